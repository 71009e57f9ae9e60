"use strict";
// One page from plain numbers. Names come from users: they are set as text, and escaped where Plotly reads markup.
const $ = id => document.getElementById(id);
const COLOURS = {
  light: ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07d00", "#3a92c4", "#7a7a00", "#666666"],
  dark: ["#56b4e9", "#ff9d66", "#2fd6a5", "#e6a4c8", "#e6b83c", "#8ecdf2", "#f0e442", "#b5b5b5"],
};
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
// The numbers of page_data.py; `fedmix watch` replaces them by newer ones.
let data = JSON.parse($("data").textContent);
// What the reader has chosen with the controls.
const chosen = {
  measure: "as_sent", over: "round", smooth: 1, run: 0, frame: null, layer: "", window: 10, of: 0, client: null,
  setting: null, attack: 0, sort: null,
};

// -- words, colours and numbers ---------------------------------------------------------------------------------------

const isUnknown = value => value === null || value === undefined;
const esc = text => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
function short(text, most = 60) {
  text = String(text);
  return text.length > most ? text.slice(0, most - 1) + "…" : text;
}
const named = (text, most) => esc(short(text, most));
function some(list, most = 6) {
  return list.length <= most ? list.join(", ") : `${list.slice(0, most).join(", ")} and ${list.length - most} more`;
}
const theme = () => document.documentElement.dataset.theme === "dark" ? "dark" : "light";
const narrow = () => window.innerWidth < 600;
const colour = i => COLOURS[theme()][i % 8];
// Plotly makes a selector of a uid, so it may not hold the slashes of a path.
const uidOf = run => `run-${data.runs.indexOf(run)}`;
const dash = i => DASHES[Math.floor(i / 8) % DASHES.length];
function faded(hex, alpha) {
  const channels = [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16));
  return `rgba(${channels.join(",")},${alpha})`;
}
function figures(n) {
  if (isUnknown(n)) return "–";
  const size = Math.abs(n);
  return n.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2);
}
const percent = share => isUnknown(share) ? "–" : figures(100 * share);
const mean = list => list.reduce((a, b) => a + b, 0) / list.length;
function deviation(list) {
  if (list.length < 2) return 0;
  const middle = mean(list);
  return Math.sqrt(list.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (list.length - 1));
}
function median(sorted) {
  const half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}
const last = list => [...list].reverse().find(value => !isUnknown(value)) ?? null;
function smoothed(values, window) {
  if (window <= 1) return values;
  return values.map((value, i) => {
    if (value === null) return null;
    return mean(values.slice(Math.max(0, i - window + 1), i + 1).filter(v => v !== null));
  });
}

// -- elements and charts ----------------------------------------------------------------------------------------------

function element(tag, text, attributes = {}) {
  const node = document.createElement(tag);
  if (!isUnknown(text)) node.textContent = text;
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}
function headRow(texts) {
  const row = element("tr");
  row.append(...texts.map(text => element("th", text, { scope: "col" })));
  return row;
}
function bodyRow(texts) {
  const row = element("tr");
  row.append(...texts.map(text => element("td", text)));
  return row;
}
function options(select, items, value) {
  const wanted = items.map(([key, text]) => `${key} ${text}`).join("\n");
  if (select.dataset.items !== wanted) {
    select.replaceChildren(...items.map(([key, text]) => element("option", short(text, 80), { value: key })));
    select.dataset.items = wanted;
  }
  select.value = String(value);
}
// What the reader has zoomed into or hidden stays so while `key` stays the same.
function layout(title, x, y, more = {}, key = "") {
  const dark = theme() === "dark";
  const ink = dark ? "#e6e9ec" : "#1b1f24";
  const grid = dark ? "#333b44" : "#e4e7eb";
  const axis = { gridcolor: grid, zerolinecolor: grid, automargin: true };
  const shape = {
    uirevision: key || "same",
    // set as text above the chart, where it wraps
    meta: { title },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: ink, family: "system-ui, sans-serif", size: 12 },
    margin: { l: 50, r: 12, t: 30, b: 45 },
    xaxis: { ...axis, title: { text: x } },
    yaxis: { ...axis, title: { text: y } },
    legend: legendBelow(narrow() ? -0.34 : -0.22),
    hovermode: "closest",
    dragmode: narrow() ? false : "zoom",
  };
  for (const [name, value] of Object.entries(more)) {
    const isAxis = /^[xy]axis/.test(name);
    shape[name] = isAxis ? { ...axis, ...shape[name], ...value } : value;
  }
  return shape;
}
const legendBelow = y => ({ orientation: "h", y, x: 0, uirevision: "same" });
// Places 0, 1, 2, ... of an axis with names beside them: all, or as many as there is room for.
const allTicks = names => ({ tickmode: "array", tickvals: names.map((_, i) => i), ticktext: names });
function someTicks(names) {
  const step = Math.max(1, Math.ceil(names.length / (narrow() ? 10 : 24)));
  const at = names.map((_, i) => i).filter(i => i % step === 0);
  return { tickmode: "array", tickvals: at, ticktext: at.map(i => named(names[i], 18)) };
}
// A chart with its title and its description; without traces its figure is hidden. Whether there is something to see.
function draw(id, traces, shape, text) {
  const there = traces && traces.length;
  $(id).closest("figure").hidden = !there;
  if (!there) return false;
  const entries = traces.filter(trace => trace.showlegend !== false).length;
  // a long legend would fill a phone; a tap on a line names it
  if (narrow() && entries > 6) shape = { ...shape, showlegend: false };
  $(id + "-title").textContent = shape.meta.title;
  // Plotly would offer to upload the chart to its cloud: the page holds numbers of clients, and sends nothing to
  // anybody.
  const buttons = {
    showSendToCloud: false,
    plotlyServerURL: "",
    modeBarButtonsToRemove: ["lasso2d", "select2d", "sendChartToCloud"],
  };
  Plotly.react($(id), traces, shape, { responsive: true, displaylogo: false, ...buttons });
  $(id).setAttribute("aria-label", text);
  $(id + "-text").textContent = text;
  return true;
}
// Round -> [place on the x axis, value] of one seed, where it has a value.
function pointsOf(seed, when, at, of, window) {
  const x = at(seed);
  const y = smoothed(of(seed), window);
  const points = when(seed).map((t, i) => [t, [x[i], y[i]]]);
  return new Map(points.filter(([, [, value]]) => value !== null));
}
// Mean and a band of one sample deviation over seeds, of the same rounds: a seed that has not come so far yet does not
// count there. when, at, of: the rounds, places and values of a seed.
function banded(g, seeds, when, at, of, window = () => 1) {
  const runs = seeds.map(seed => pointsOf(seed, when, at, of, window(seed))).filter(run => run.size);
  if (!runs.length) return [];
  const x = [], y = [], low = [], high = [];
  const rounds = [...new Set(runs.flatMap(run => [...run.keys()]))].sort((a, b) => a - b);
  for (const t of rounds) {
    const points = runs.filter(run => run.has(t)).map(run => run.get(t));
    const values = points.map(([, value]) => value);
    const middle = mean(values), spread = deviation(values);
    x.push(mean(points.map(([place]) => place)));
    y.push(middle);
    low.push(middle - spread);
    high.push(middle + spread);
  }
  const line = {
    x, y, uid: `${g}-line`, name: esc(data.short[g]), mode: x.length > 60 ? "lines" : "lines+markers",
    line: { color: colour(g), dash: dash(g), width: 2 }, marker: { size: 4, color: colour(g) },
    legendgroup: String(g), connectgaps: true,
  };
  if (runs.length < 2) return [line];
  const edge = {
    x, mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false, legendgroup: String(g),
  };
  const lower = { ...edge, uid: `${g}-low`, y: low };
  const upper = { ...edge, uid: `${g}-high`, y: high, fill: "tonexty", fillcolor: faded(colour(g), 0.18) };
  return [lower, upper, line];
}
// One measure of every round, of all groups.
function bandedEveryRound(of, window) {
  const rounds = seed => seed.every.round;
  return data.curves.flatMap((seeds, g) => banded(g, seeds, rounds, rounds, of, window));
}
// [name, last value, first value] of each line that is drawn.
function ends(traces) {
  const lines = traces.filter(trace => /-line$/.test(trace.uid));
  return lines.map(trace => [data.short[parseInt(trace.uid)], last(trace.y), trace.y.find(value => value !== null)]);
}

// -- the top and the table --------------------------------------------------------------------------------------------

function top_() {
  document.title = short(data.title, 80) + " · fedmix";
  $("title").textContent = short(data.title, 200);
  $("verdict").textContent = data.glance.verdict;
  $("spent").textContent = data.glance.spent;
  const wrong = data.glance.wrong;
  const list = element("ul");
  for (const row of wrong.slice(0, 20)) list.append(element("li", short(`${row.run}: ${row.what}`, 400)));
  if (wrong.length > 20) list.append(element("li", `and ${wrong.length - 20} more`));
  $("wrong").replaceChildren(...(wrong.length ? [list] : []));
  $("notes").textContent = data.glance.notes.join(" ");
}

// A cell is a text, a number, or [mean, deviation over seeds].
const valueOf = (row, column) => Array.isArray(row[column]) ? row[column][0] : row[column];
const isOverSeeds = column => data.table.some(row => Array.isArray(row[column]));
function withDeviation([middle, spread], plusMinus) {
  return figures(middle) + (spread !== null ? ` ${plusMinus} ${figures(spread)}` : "");
}
function cellText(column, value) {
  if (column === "method") return short(value, 120);
  if (Array.isArray(value)) return withDeviation(value, "±");
  return numberText(column, value);
}
function numberText(column, value) {
  if (column === "rounds") return String(value);
  return column === "GiB" && value !== null && value < 1 ? value.toFixed(4) : figures(value);
}
function sortedRows() {
  const rows = [...data.table];
  if (!chosen.sort) return rows;
  const { column, up } = chosen.sort;
  return rows.sort((a, b) => {
    const x = valueOf(a, column), y = valueOf(b, column);
    // unknown is last, either way
    if (x === null || y === null) return (x === null) - (y === null);
    return (up ? 1 : -1) * (typeof x === "string" ? x.localeCompare(y) : x - y);
  });
}
function bestValues() {
  const best = {};
  for (const [column, lowerIsBetter] of Object.entries(data.judged)) {
    const known = data.table.map(row => valueOf(row, column)).filter(value => value !== null);
    if (known.length > 1) best[column] = lowerIsBetter ? Math.min(...known) : Math.max(...known);
  }
  return best;
}
function sortBy(column) {
  const isAgain = chosen.sort && chosen.sort.column === column;
  const lowestFirst = ["method", "GiB", "minutes", "rounds"].includes(column) || Boolean(data.judged[column]);
  chosen.sort = { column, up: isAgain ? !chosen.sort.up : lowestFirst };
  table();
}
function headCell(column) {
  const cell = element("th", null, { scope: "col" });
  const isSorted = chosen.sort && chosen.sort.column === column;
  if (isSorted) cell.setAttribute("aria-sort", chosen.sort.up ? "ascending" : "descending");
  const button = element("button", column, { type: "button" });
  button.onclick = () => sortBy(column);
  cell.append(button);
  return cell;
}
function table() {
  const columns = ["method", ...data.columns];
  const best = bestValues();
  const head = element("tr");
  head.append(...columns.map(headCell));
  const body = sortedRows().map(row => {
    const line = element("tr");
    for (const column of columns) {
      const cell = element("td", cellText(column, row[column]));
      if (best[column] !== undefined && valueOf(row, column) === best[column]) cell.className = "best";
      line.append(cell);
    }
    return line;
  });
  const thead = element("thead"), tbody = element("tbody");
  thead.append(head);
  tbody.append(...body);
  $("table").replaceChildren(thead, tbody);
}
function save(name, text, type) {
  const link = element("a", null, { download: name, href: URL.createObjectURL(new Blob([text], { type })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
function csv() {
  // a spreadsheet would compute what begins with one of these signs
  const quoted = text => `"${String(text ?? "").replace(/"/g, '""').replace(/^([=+\-@])/, "'$1")}"`;
  const names = data.columns.flatMap(c => isOverSeeds(c) ? [c, c + " deviation over seeds"] : [c]);
  const cells = (row, column) => {
    if (!isOverSeeds(column)) return [row[column] ?? ""];
    return row[column] ? [row[column][0], row[column][1] ?? ""] : ["", ""];
  };
  const head = ["method", ...names].map(quoted);
  const body = data.table.map(row => [quoted(row.method), ...data.columns.flatMap(column => cells(row, column))]);
  return [head, ...body].map(line => line.join(",")).join("\n") + "\n";
}
function latex() {
  const signs = { "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}" };
  const safe = text => String(text).replace(/[\\{}$&#_%~^]/g, sign => signs[sign] ?? "\\" + sign);
  const cell = value => {
    if (isUnknown(value)) return "--";
    if (Array.isArray(value)) return withDeviation(value, "$\\pm$");
    return value > 0 && value < 1 ? String(Number(value.toPrecision(3))) : figures(value);
  };
  const line = cells => cells.join(" & ") + " \\\\";
  return [
    "\\begin{tabular}{l" + "r".repeat(data.columns.length) + "}",
    "\\hline",
    line(["method", ...data.columns].map(safe)),
    "\\hline",
    ...data.table.map(row => line([safe(row.method), ...data.columns.map(column => cell(row[column]))])),
    "\\hline",
    "\\end{tabular}",
  ].join("\n") + "\n";
}

// -- learning ---------------------------------------------------------------------------------------------------------

const MEASURES = {
  as_sent: "as sent accuracy, validation, %",
  server: "server accuracy, validation, %",
  no_identity: "no identity accuracy, validation, %",
  worst_decile: "worst decile of as sent accuracy, validation, %",
  loss: "training loss",
};
// Loss is of every round, accuracies are of evaluation rounds.
const seriesOf = (seed, measure) => measure === "loss" ? seed.every : seed;
function learningTitle(measure, where, lines) {
  const what = `${MEASURES[measure].replace(", %", "")} over ${where}`;
  const [best, second] = [...lines].sort((a, b) => b[1] - a[1]);
  if (!best) return what;
  if (measure === "loss" || !second) return `${what}: from ${figures(best[2])} to ${figures(best[1])}`;
  const isLevel = best[1] - second[1] < 0.1;
  const words = isLevel ? `${best[0]} and ${second[0]} end level` : `${best[0]} ends highest`;
  return `${what}: ${words}, at ${figures(best[1])}`;
}
function learning() {
  const isKnown = measure => data.curves.flat().some(seed => seriesOf(seed, measure)[measure].some(v => v !== null));
  const known = Object.keys(MEASURES).filter(isKnown);
  if (!known.includes(chosen.measure)) chosen.measure = known[0] || "loss";
  options($("measure"), known.map(measure => [measure, MEASURES[measure]]), chosen.measure);
  const { measure, over } = chosen;
  const series = key => seed => seriesOf(seed, measure)[key];
  const smooth = () => chosen.smooth;
  const traces = data.curves.flatMap((seeds, g) => {
    return banded(g, seeds, series("round"), series(over), series(measure), smooth);
  });
  const lines = ends(traces);
  const where = over === "gib" ? "what was sent" : "rounds";
  const x = over === "gib" ? "GiB sent, down and up" : "round";
  const atTheEnd = some(lines.map(([name, end]) => `${name} ${figures(end)}`), 12);
  const note = measure !== "loss" ? "" :
    " FedMix's is its bound over all experts, and is not comparable with another method's.";
  const shape = layout(learningTitle(measure, where, lines), x, MEASURES[measure], {}, measure + over);
  const text = `${MEASURES[measure]} over ${where}; at the end ${atTheEnd}.${note}`;
  $("learning").hidden = !draw("curves", traces, shape, text);
}

// -- experts ----------------------------------------------------------------------------------------------------------

function experts() {
  const runs = data.runs.map((run, i) => [i, run]).filter(([, run]) => run.maps || run.use);
  $("experts").hidden = !runs.length;
  if (!runs.length) return;
  if (!runs.some(([i]) => i === chosen.run)) chosen.run = runs[0][0];
  options($("run"), runs.map(([i, run]) => [i, run.name]), chosen.run);
  const run = data.runs[chosen.run];
  drawMembership(run.membership);
  drawMaps(run.maps);
  drawUse(run.use);
  drawSent();
}
// Who belongs together, as experts say, and how experts were split and merged.
function drawMembership(found) {
  $("membership").hidden = !found;
  if (!found) return;
  $("membership-words").textContent = found.words;
  const rows = found.groups.map(({ expert, clients, sure }) => {
    const row = element("tr");
    const names = some(clients.map(name => short(name, 40)), 30);
    row.append(element("td", `expert ${expert}`), element("td", clients.length), element("td", names, { class: "words" }), element("td", figures(sure)));
    return row;
  });
  $("membership-groups").replaceChildren(headRow(["expert", "clients", "who", "mean q(z|s)"]), ...rows);
  $("membership-tree").replaceChildren(...found.tree.map(({ round, words }) => element("li", `round ${round}: ${words}`)));
  $("membership-tree").hidden = !found.tree.length;
}
const KINDS_OF_SIDE = {
  label: "label", client: "client", column: "side information", rotation: "rotation", group: "group",
};
function drawMaps(maps) {
  $("frame").disabled = !maps;
  if (!maps) {
    draw("zc");
    draw("zs");
    return;
  }
  const most = maps.frames.length - 1;
  const at = chosen.frame === null ? most : Math.min(chosen.frame, most);
  const frame = maps.frames[at];
  $("frame").max = most;
  $("frame").value = at;
  $("frame-is").textContent = frame.round;
  const kind = KINDS_OF_SIDE[maps.side];
  const value = kind || "value of c";
  drawMap("zc", frame, maps.values, `q(z|c) after round ${frame.round}: ${sharpness(frame.zc, value)}`, kind || "c",
    `Which expert the shared posterior gives each ${value} to: ${sharp(frame.zc)}.`);
  const letter = s => String.fromCharCode(65 + maps.groups[s] % 26);
  const clients = maps.clients.map((name, s) => maps.groups ? `${name} (group ${letter(s)})` : name);
  const order = maps.groups ? ", clients in the order of their true groups" : "";
  const leftOut = maps.left_out ? ` ${maps.left_out} more clients are not shown.` : "";
  drawMap("zs", frame, clients, `q(z|s) after round ${frame.round}: ${sharpness(frame.zs, "client")}`,
    maps.groups ? "client, by true group" : "client",
    `Which experts each client uses${order}: ${sharp(frame.zs)}.${leftOut}`);
}
// id: zc or zs, of the chart and of the map in the frame. names: of the map's rows.
function drawMap(id, frame, names, title, y, text) {
  const q = frame[id];
  const experts = frame.zs[0] ? frame.zs[0].map((_, k) => `expert ${k}`) : [];
  const trace = {
    type: "heatmap", z: q, x: experts, y: names.map((_, i) => i), zmin: 0, zmax: 1, colorscale: "Cividis",
    colorbar: { thickness: 10, title: { text: "q" } },
    text: q.map((row, i) => row.map(() => named(names[i] ?? i, 40))),
    hovertemplate: "%{text}, %{x}: %{z:.2f}<extra></extra>",
  };
  const yaxis = { autorange: "reversed", automargin: true, title: { text: y }, ...someTicks(names) };
  draw(id, q.length ? [trace] : [], layout(title, "", y, { yaxis }), text);
}
const largestShare = rows => figures(mean(rows.map(row => Math.max(...row))));
const sharpness = (rows, what) => rows.length ? `one expert has ${largestShare(rows)} of a ${what}` : "";
function sharp(rows) {
  if (!rows.length) return "none";
  return `the largest share is ${largestShare(rows)} on average, 1 being one expert alone`;
}
function drawUse(use) {
  if (!use) {
    draw("use");
    return;
  }
  const traces = use.use.map((y, k) => ({
    x: use.round, y, name: `expert ${k}`, mode: "lines", stackgroup: "one",
    line: { width: 0.5, color: colour(k) }, fillcolor: faded(colour(k), 0.75),
  }));
  const shares = use.use.map(last);
  const lowest = figures(Math.min(...shares)), highest = figures(Math.max(...shares));
  const title = `use of each expert: from ${lowest} to ${highest} at the end`;
  const atTheEnd = shares.map((share, k) => `expert ${k} ${figures(share)}`).join(", ");
  draw("use", traces, layout(title, "round", "share", { yaxis: { range: [0, 1], automargin: true } }),
    `Share of each expert over rounds; at the end ${atTheEnd}.`);
}
function drawSent() {
  const traces = bandedEveryRound(seed => seed.every.mib);
  const lines = ends(traces);
  const falling = lines.find(([, end, start]) => end < 0.99 * start);
  let title = "what a round sends: the same in every round";
  if (falling) {
    const [name, end, start] = falling;
    title = `what a round sends falls as experts are pruned: ${name} from ${figures(start)} to ${figures(end)} MiB`;
  }
  const rising = lines.find(([, end, start]) => end > 1.01 * start);
  if (rising && !falling) {
    const [name, end, start] = rising;
    title = `what a round sends grows with the experts: ${name} from ${figures(start)} to ${figures(end)} MiB`;
  }
  const firstAndLast = some(lines.map(([name, end, start]) => `${name} ${figures(start)} and ${figures(end)}`));
  const yaxis = { rangemode: "tozero", automargin: true };
  draw("sent", traces, layout(title, "round", "MiB, down and up", { yaxis }),
    `MiB of a round, first and last: ${firstAndLast}.`);
}

// -- divergence -------------------------------------------------------------------------------------------------------

// Points of a curve in the window's rounds, where a point stands for `step` rounds.
const windowPoints = step => Math.max(1, Math.round(chosen.window / step));
function layerTraces(layer) {
  const runs = data.runs.filter(run => run.layers && run.layers.layers[layer]);
  return runs.map(run => ({
    x: run.layers.round, y: smoothed(run.layers.layers[layer], windowPoints(run.layers.step)), uid: uidOf(run),
    name: named(run.name, 40), mode: "lines", line: { color: colour(run.group), dash: dash(run.group) },
  }));
}
function divergenceTitle(layer, lines) {
  const what = layer ? `gradient divergence of ${short(layer, 60)}` : "gradient divergence";
  const [lowest, next] = [...lines].sort((a, b) => a[1] - b[1]);
  if (!next) return `${what} of clients' updates over rounds`;
  const isLevel = next[1] < 1.02 * lowest[1];
  if (isLevel) return `${what}: clients of ${lowest[0]} and ${next[0]} are about as much alike at the end`;
  return `${what}: ${lowest[0]}'s clients are most alike at the end`;
}
function divergence() {
  const names = data.runs.flatMap(run => run.layers ? Object.keys(run.layers.layers) : []);
  const layers = [...new Set(names)].map(name => [name, name]);
  options($("layer"), [["", "all together"], ...layers], chosen.layer);
  const layer = chosen.layer;
  const traces = layer ? layerTraces(layer)
    : bandedEveryRound(seed => seed.every.divergence, seed => windowPoints(seed.every.step));
  const lines = layer ? traces.map(trace => [trace.name, last(trace.y)]) : ends(traces);
  const atTheEnd = some(lines.map(([name, end]) => `${name} ${figures(end)}`), 12);
  const text = `Divergence of the clients' updates over rounds, sliding window of ${chosen.window} rounds; ` +
    `lower is more alike. At the end: ${atTheEnd}.`;
  const shape = layout(divergenceTitle(layer, lines), "round", "divergence", {}, layer);
  $("divergence").hidden = !draw("div", traces, shape, text);
}

// -- clients ----------------------------------------------------------------------------------------------------------

function clients() {
  const runs = data.runs.map((run, i) => [i, run]).filter(([, run]) => run.clients);
  $("clients").hidden = !runs.length;
  if (!runs.length) return;
  drawSpread(runs.map(([, run]) => run));
  if (!runs.some(([i]) => i === chosen.of)) chosen.of = runs[0][0];
  options($("of"), runs.map(([i, run]) => [i, run.name]), chosen.of);
  const run = data.runs[chosen.of];
  const { names, fine_tuned } = run.clients;
  const worstFirst = names.map((_, s) => s).sort((a, b) => fine_tuned[a] - fine_tuned[b]);
  worstClients(run, worstFirst);
  if (chosen.client === null || chosen.client >= names.length) chosen.client = worstFirst[0];
  options($("client"), names.map((name, s) => [s, name]), chosen.client);
  drawClient(run.clients, chosen.client);
}
// Accuracies of a group's clients in all its seeds, and what to call them.
function boxOf(g, runs) {
  const members = runs.filter(run => run.group === g);
  const nameOf = (run, s) => members.length > 1 ? `${run.clients.names[s]}, seed ${run.seed}` : run.clients.names[s];
  const points = members.flatMap(run => run.clients.fine_tuned.map((value, s) => [value, nameOf(run, s)]));
  const known = points.filter(([value]) => value !== null);
  return { values: known.map(([value]) => 100 * value), names: known.map(([, name]) => named(name, 60)) };
}
function drawSpread(runs) {
  const groups = [...new Set(runs.map(run => run.group))];
  const boxes = groups.map((g, at) => ({ g, at, ...boxOf(g, runs) })).filter(box => box.values.length);
  const traces = boxes.map(({ g, at, values, names }) => ({
    type: "box", x: values.map(() => at), y: values, uid: String(g), name: esc(data.short[g]),
    boxpoints: values.length > 300 ? "outliers" : "all", jitter: 0.5, pointpos: 0,
    marker: { size: 4, color: colour(g) }, quartilemethod: "linear", text: names,
    hovertemplate: "%{text}: %{y:.1f} %<extra></extra>",
  }));
  const ranges = boxes.map(({ g, values }) => {
    const sorted = [...values].sort((a, b) => a - b);
    return { g, lowest: sorted[0], highest: sorted[sorted.length - 1], middle: median(sorted) };
  });
  const [best, next] = [...ranges].sort((a, b) => b.lowest - a.lowest);
  const isClear = next && best.lowest - next.lowest > 0.1;
  const worst = isClear ? `the worst client is best off with ${data.short[best.g]}`
    : `the worst has ${figures(best.lowest)} %`;
  const ticks = allTicks(boxes.map(({ g }) => named(data.short[g], narrow() ? 14 : 24)));
  const texts = ranges.map(({ g, lowest, highest, middle }) => {
    return `${data.short[g]}: from ${figures(lowest)} to ${figures(highest)}, median ${figures(middle)}`;
  });
  draw("spread", traces,
    layout(`fine-tuned accuracy on test data, client by client: ${worst}`, "", "fine-tuned accuracy, test, %",
      { showlegend: false, xaxis: ticks }),
    some(texts) + " per cent.");
}
function worstClients(run, order) {
  const { names, fine_tuned, server, points } = run.clients;
  const rows = order.slice(0, 10).map(s => {
    return bodyRow([short(names[s], 80), figures(100 * fine_tuned[s]), percent(server[s]), points[s] ?? "–"]);
  });
  $("worst-title").textContent = `Worst clients of ${short(run.name, 60)}`;
  $("worst").replaceChildren(headRow(["client", "fine-tuned, test %", "server, test %", "points"]), ...rows);
}
// One client: how many points it has of each label, and beside it which experts it uses.
function drawClient({ names, fine_tuned, labels, classes, q }, s) {
  const traces = [];
  if (labels) {
    traces.push({
      type: "bar", x: classes.map((_, y) => y), y: labels[s], text: classes.map(name => named(name, 60)),
      textposition: "none", hovertemplate: "%{text}: %{y}<extra></extra>", name: "training points of each label",
      marker: { color: colour(0) },
    });
  }
  if (q) {
    traces.push({
      type: "bar", x: q[s].map((_, k) => k), y: q[s], name: "q(z|s) of each expert", marker: { color: colour(1) },
      xaxis: "x2", yaxis: "y2",
    });
  }
  const both = labels && q;
  const eitherOne = labels ? "its labels" : "its gate (which labels it holds was not recorded)";
  const title = `client ${short(names[s], 40)}: ${both ? "its labels, its gate" : eitherOne}`;
  const axes = {
    xaxis: { ...someTicks(classes), domain: [0, both ? 0.55 : 1] },
    xaxis2: { title: { text: "expert" }, dtick: 1, domain: [both ? 0.66 : 0, 1], anchor: "y2" },
    yaxis2: { anchor: "x2", range: [0, 1] },
    showlegend: true,
  };
  const gate = q ? `, gate ${q[s].map((share, k) => `expert ${k} ${figures(share)}`).join(", ")}` : "";
  draw("one", traces, layout(title, labels ? "label" : "", labels ? "points" : "", axes, String(s)),
    `Client ${short(names[s], 60)}: fine-tuned accuracy ${figures(100 * fine_tuned[s])} per cent on test data${gate}.`);
}

// -- against a setting ------------------------------------------------------------------------------------------------

const TUNED = "fine-tuned, test";
const SWEEP_KINDS = [TUNED, "server, validation", "no identity, validation"];
function sweep() {
  $("sweep").hidden = !data.sweep;
  if (!data.sweep) return;
  const keys = Object.keys(data.sweep.keys);
  if (!keys.includes(chosen.setting)) chosen.setting = keys[0];
  options($("setting"), keys.map(key => [key, key]), chosen.setting);
  drawAgainst(chosen.setting, data.sweep.keys[chosen.setting], data.sweep.beside);
}
// A line alone has every kind of accuracy, and what was sent; several lines have the fine-tuned one.
function drawAgainst(key, lines, beside) {
  const isAlone = lines.length === 1;
  const traces = isAlone ? SWEEP_KINDS.map((kind, i) => sweepTrace(lines[0], kind, kind, i))
    : lines.map((line, l) => sweepTrace(line, TUNED, named(line.name, 40), l));
  const shown = traces.filter(trace => trace.y.some(value => value !== null));
  shown.push(...besideTraces(lines, beside));
  if (isAlone) {
    shown.push({
      x: lines[0].values, y: lines[0].rows.map(row => row.GiB), name: "GiB sent", yaxis: "y2",
      mode: "lines+markers", line: { color: colour(6), dash: "dot" },
    });
  }
  const yaxis2 = { overlaying: "y", side: "right", title: { text: "GiB" }, rangemode: "tozero", automargin: true };
  const y = isAlone ? "accuracy, %" : "fine-tuned accuracy, test, %";
  draw("against", shown, layout(againstTitle(key, lines), named(key, 60), y, isAlone ? { yaxis2 } : {}, key),
    againstText(key, lines));
}
function sweepTrace(line, kind, name, i) {
  return {
    x: line.values, y: line.rows.map(row => row[kind] && row[kind][0]),
    error_y: { type: "data", array: line.rows.map(row => row[kind] ? row[kind][1] || 0 : 0) },
    name, mode: "lines+markers", line: { color: colour(i), dash: dash(i) },
  };
}
// Other methods, which do not have the setting: lines without a slope.
function besideTraces(lines, beside) {
  const values = lines.flatMap(line => line.values);
  const edges = [Math.min(...values), Math.max(...values)];
  const traces = beside.map((row, i) => row[TUNED] && {
    x: edges, y: [row[TUNED][0], row[TUNED][0]], name: `${named(row.method, 40)}, ${TUNED}`, mode: "lines",
    line: { color: colour(7), dash: DASHES[1 + i % 4] },
  });
  return traces.filter(Boolean);
}
// Every point of the lines that has a fine-tuned accuracy.
function tunedPoints(lines) {
  const points = lines.flatMap(line => line.rows.map((row, i) => ({ value: line.values[i], row, name: line.name })));
  return points.filter(({ row }) => row[TUNED]);
}
function againstTitle(key, lines) {
  const [best] = tunedPoints(lines).sort((a, b) => b.row[TUNED][0] - a.row[TUNED][0]);
  if (!best) return `accuracy against ${key}`;
  const where = `${key} = ${best.value}${best.name ? `, ${best.name}` : ""}`;
  const highest = `highest at ${where}, ${figures(best.row[TUNED][0])} %`;
  if (lines.length > 1) return `fine-tuned accuracy, test, against ${key}: ${highest}`;
  return `accuracy against ${key}: fine-tuned (test) is ${highest}`;
}
function againstText(key, lines) {
  const isAlone = lines.length === 1;
  const points = tunedPoints(lines).map(({ value, row, name }) => {
    const line = name ? ` (${name})` : "";
    const sent = isAlone ? `, ${numberText("GiB", row.GiB)} GiB` : "";
    return `${value}${line} ${figures(row[TUNED][0])} %${sent}`;
  });
  const andSent = isAlone ? " and what was sent" : "";
  return `Fine-tuned accuracy on test data${andSent} against ${key}: ${some(points, 12)}.`;
}

// -- new clients and kinds of inference -------------------------------------------------------------------------------

function fresh() {
  const runs = data.runs.filter(run => run.new || run.evaluation);
  $("new").hidden = !runs.length;
  if (!runs.length) return;
  drawNewClients(runs);
  inferenceTable(runs);
  const notes = runs.map(run => run.new && run.new.note).filter(Boolean);
  $("new-note").textContent = [...new Set(notes)].join(" ");
}
const curvesOf = run => (run.new && run.new.curve) || [];
const withoutLabels = run => (run.new && run.new.without) || [];
function newClientTraces(run) {
  const curves = curvesOf(run);
  if (!curves.length) return [];
  const withLabels = curves.map((curve, i) => ({
    x: curve.points, y: curve.accuracy.map(share => 100 * share), uid: `${uidOf(run)}-with-${i}`,
    name: `${named(run.name, 30)}: ${named(curve.what, 40)}`, mode: "lines+markers",
    line: { color: colour(run.group), dash: DASHES[i % 2], width: 2 },
  }));
  const x = curves[0].points;
  const without = withoutLabels(run).map((row, i) => ({
    x, y: x.map(() => 100 * row.accuracy), uid: `${uidOf(run)}-${i}`,
    name: `${named(run.name, 30)}, no labels: ${named(row.what, 40)}`, mode: "lines+markers",
    marker: { symbol: i + 1, size: 7, color: colour(run.group) },
    line: { color: colour(run.group), dash: "dot", width: 1 },
  }));
  return [...withLabels, ...without];
}
function drawNewClients(runs) {
  const curves = runs.flatMap(run => curvesOf(run).map(curve => ({ run, curve, end: 100 * last(curve.accuracy) })));
  const [best] = [...curves].sort((a, b) => b.end - a.end);
  const title = best ? `new clients: ${short(best.run.name, 40)} reaches ${figures(best.end)} % with ` +
    `${last(best.curve.points)} labelled points` : "";
  const texts = curves.map(({ run, curve }) => {
    const points = curve.points.map((count, i) => `${figures(100 * curve.accuracy[i])} with ${count}`);
    return `${short(run.name, 40)}, ${curve.what}: ${points.join(", ")}`;
  });
  const more = { xaxis: { type: "category", automargin: true }, legend: legendBelow(narrow() ? -0.45 : -0.3) };
  draw("labelled", runs.flatMap(newClientTraces),
    layout(title, "labelled points of a client", "accuracy on test points, %", more),
    "Accuracy on clients that never took part, after their gate, or everything, was trained on a few labelled " +
    `points: ${some(texts, 4)}.`);
}
function inferenceTable(runs) {
  const line = (run, who, what, row) => {
    const shares = [row.accuracy, row.worst, row.ece];
    return bodyRow([short(run.name, 60), who, short(what, 90), ...shares.map(percent)]);
  };
  const rows = runs.flatMap(run => {
    const newcomers = run.new && run.new.held_out ? "new, without labels" : "anybody, without labels";
    const tookPart = run.evaluation || [];
    return [
      ...tookPart.map(row => line(run, "that took part", `${row.kind}: ${row.what}`, row)),
      ...withoutLabels(run).map(row => line(run, newcomers, row.what, row)),
    ];
  });
  const head = ["run", "clients", "inference", "accuracy %", "worst decile %", "calibration error %"];
  $("inference").replaceChildren(headRow(head), ...rows);
}

// -- what leaked ------------------------------------------------------------------------------------------------------

function audit() {
  const attacks = data.runs.flatMap(run => run.audit ? run.audit.attacks.map(attack => ({ run, attack })) : []);
  $("audit").hidden = !attacks.length;
  if (!attacks.length) return;
  if (chosen.attack >= attacks.length) chosen.attack = 0;
  const names = attacks.map(({ run, attack }, i) => [i, `${run.name}: ${attack.attack}, ${attack.when}`]);
  options($("attack"), names, chosen.attack);
  const { run, attack } = attacks[chosen.attack];
  const distance = figures(attack.distance), guess = figures(run.audit.guess);
  const title = `label shares as the server reconstructs them: off by ${distance} on average, a guess by ${guess}`;
  draw("marginals", attackTraces(run, attack), layout(title, "true share", "reconstructed", {}, String(chosen.attack)),
    `${attack.attack}, ${attack.when}: distance ${distance} on average (0 is known exactly), ` +
    `a guess from everybody ${guess}.`);
}
// A point for each label of each client that there is an estimate for.
function attackTraces(run, attack) {
  const x = [], y = [], text = [];
  (attack.found || []).forEach((estimate, s) => {
    const truth = run.audit.true[s];
    if (!estimate || !truth) return;
    estimate.forEach((share, label) => {
      x.push(truth[label]);
      y.push(share);
      text.push(`client ${named(run.audit.names[s], 30)}, label ${label}`);
    });
  });
  if (!x.length) return [];
  const points = {
    x, y, text, mode: "markers", type: "scatter", name: "a label of a client",
    marker: { size: 5, color: colour(run.group), opacity: 0.5 },
    hovertemplate: "%{text}: true %{x:.2f}, found %{y:.2f}<extra></extra>",
  };
  const exact = { x: [0, 1], y: [0, 1], mode: "lines", name: "known exactly", line: { dash: "dot", color: colour(7) } };
  return [points, exact];
}

// -- how to do it again -----------------------------------------------------------------------------------------------

function runDetails(run) {
  const { packages, commits, python, cores, platform, engine, started, sessions, command, recipe } = run.about;
  const commit = commits && commits.length ? ` (commit ${short(commits.join(", "), 80)})` : "";
  const software = `fedmix ${packages.fedmix || "?"}${commit}, torch ${packages.torch || "?"}, Python ${python || "?"}`;
  const machine = `${cores || "?"} cores, ${platform || "?"}`;
  const work = `engine ${engine || "?"}, started ${started || "?"}, ${sessions} session${sessions === 1 ? "" : "s"}`;
  const settings = Object.entries(recipe).map(([key, value]) => `${key} = ${short(JSON.stringify(value), 400)}`);
  const details = element("details");
  details.append(
    element("summary", short(run.name, 120)),
    element("p", `${software}, ${machine}; ${work}`),
    element("pre", short(command, 2000)),
    element("pre", settings.join("\n")),
    element("p", short(run.path, 400)),
  );
  return details;
}
function about() {
  // what was open stays open
  const open = [...$("about").children].map(child => child.open);
  const details = data.runs.map(runDetails);
  details.forEach((child, i) => { child.open = open[i] || false; });
  $("about").replaceChildren(...details);
}

function missing() {
  $("missing").textContent = data.missing.length ? `Not on this page: ${data.missing.join("; ")}.` : "";
}

// -- all of it, and the controls --------------------------------------------------------------------------------------

function all() {
  for (const show of [top_, missing, table, learning, experts, divergence, clients, sweep, fresh, audit, about]) show();
  document.body.dataset.drawn = "yes";
}
// A control sets chosen[key]; `then` draws what depends on it.
function on(id, event, key, then, isNumber) {
  const control = $(id), output = $(id + "-is");
  control.addEventListener(event, () => {
    chosen[key] = isNumber ? Number(control.value) : control.value;
    // beside the frame stands its round, and not its number
    if (output && id !== "frame") output.textContent = chosen[key];
    then();
  });
}
on("measure", "change", "measure", learning);
on("over", "change", "over", learning);
on("smooth", "input", "smooth", learning, true);
on("run", "change", "run", () => { chosen.frame = null; experts(); }, true);
on("frame", "input", "frame", experts, true);
on("layer", "change", "layer", divergence);
on("window", "input", "window", divergence, true);
on("of", "change", "of", () => { chosen.client = null; clients(); }, true);
on("client", "change", "client", clients, true);
on("setting", "change", "setting", sweep);
on("attack", "change", "attack", audit, true);
$("csv").onclick = () => save("fedmix.csv", csv(), "text/csv");
$("latex").onclick = () => save("fedmix.tex", latex(), "text/x-tex");
function paint(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = name === "dark" ? "light" : "dark";
  all();
}
$("theme").onclick = () => paint(theme() === "dark" ? "light" : "dark");
const wanted = matchMedia("(prefers-color-scheme: dark)");
wanted.addEventListener("change", event => paint(event.matches ? "dark" : "light"));
paint(wanted.matches ? "dark" : "light");

// `fedmix watch` serves the same page, and newer numbers beside it.
if (data.live) {
  let known = data.version;
  const look = async () => {
    try {
      const answer = await fetch("data.json?known=" + encodeURIComponent(known), { cache: "no-store" });
      if (answer.status === 200) {
        data = await answer.json();
        known = data.version;
        all();
      }
      const trouble = answer.status >= 400 ? short(await answer.text(), 200) : "";
      $("live").textContent = trouble ? `cannot be read now; this is the last that was seen (${trouble})`
        : "live, " + new Date().toLocaleTimeString();
    } catch {
      $("live").textContent = "the server is gone; this is the last that was seen";
    }
    setTimeout(look, 2000);
  };
  setTimeout(look, 2000);
}
