"use strict";
// One page from plain numbers. Names come from users: they are set as text, and escaped where Plotly reads markup.
const $ = id => document.getElementById(id);
const COLOURS = { light: ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07d00", "#3a92c4", "#7a7a00", "#666666"],
                  dark:  ["#56b4e9", "#ff9d66", "#2fd6a5", "#e6a4c8", "#e6b83c", "#8ecdf2", "#f0e442", "#b5b5b5"] };
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
let data = JSON.parse($("data").textContent);
const chosen = { measure: "as_sent", over: "round", smooth: 1, run: 0, frame: null, layer: "", window: 10, of: 0, client: null, setting: null, attack: 0, sort: null };

const esc = text => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const short = (text, most = 60) => { text = String(text); return text.length > most ? text.slice(0, most - 1) + "…" : text; };
const named = (text, most) => esc(short(text, most));
const theme = () => document.documentElement.dataset.theme === "dark" ? "dark" : "light";
const colour = i => COLOURS[theme()][i % 8];
const dash = i => DASHES[Math.floor(i / 8) % DASHES.length];
const faded = (hex, alpha) => `rgba(${[1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16)).join(",")},${alpha})`;
const figures = n => n === null || n === undefined ? "–" : Math.abs(n) >= 100 ? n.toFixed(0) : Math.abs(n) >= 10 ? n.toFixed(1) : n.toFixed(2);
const mean = list => list.reduce((a, b) => a + b, 0) / list.length;
const narrow = () => window.innerWidth < 600;
const some = (list, most = 6) => list.length <= most ? list.join(", ") : `${list.slice(0, most).join(", ")} and ${list.length - most} more`;
const last = list => { for (let i = list.length - 1; i >= 0; i--) if (list[i] !== null && list[i] !== undefined) return list[i]; return null; };

function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== undefined && text !== null) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
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
  const dark = theme() === "dark", ink = dark ? "#e6e9ec" : "#1b1f24", grid = dark ? "#333b44" : "#e4e7eb";
  const axis = { gridcolor: grid, zerolinecolor: grid, automargin: true };
  const shape = {
    uirevision: key || "same",
    meta: { title },  // set as text above the chart, where it wraps
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink, family: "system-ui, sans-serif", size: 12 },
    margin: { l: 50, r: 12, t: 30, b: 45 }, xaxis: { ...axis, title: { text: x } }, yaxis: { ...axis, title: { text: y } },
    legend: { orientation: "h", y: narrow() ? -0.34 : -0.22, x: 0, uirevision: "same" }, hovermode: "closest", dragmode: narrow() ? false : "zoom",
  };
  for (const [name, value] of Object.entries(more)) shape[name] = /^[xy]axis/.test(name) ? { ...axis, ...shape[name], ...value } : value;
  return shape;
}
function draw(id, traces, shape, text) {
  const there = traces && traces.length;
  $(id).closest("figure").hidden = !there;
  if (!there) return false;
  if (narrow() && traces.filter(t => t.showlegend !== false).length > 6) shape = { ...shape, showlegend: false };  // a tap on a line names it
  $(id + "-title").textContent = shape.meta.title;
  // Plotly would offer to upload the chart to its cloud: the page holds numbers of clients, and sends nothing to anybody.
  const buttons = { showSendToCloud: false, plotlyServerURL: "", modeBarButtonsToRemove: ["lasso2d", "select2d", "sendChartToCloud"] };
  Plotly.react($(id), traces, shape, { responsive: true, displaylogo: false, ...buttons });
  $(id).setAttribute("aria-label", text);
  $(id + "-text").textContent = text;
  return true;
}
function smoothed(values, window) {
  if (window <= 1) return values;
  return values.map((value, i) => {
    if (value === null) return null;
    const some = values.slice(Math.max(0, i - window + 1), i + 1).filter(v => v !== null);
    return some.reduce((a, b) => a + b, 0) / some.length;
  });
}
// Mean and a band of one sample deviation over seeds, of the same rounds: a seed that has not come so far yet does not count there.
function banded(g, seeds, when, at, of, window = () => 1) {
  const runs = seeds.map(seed => { const y = smoothed(of(seed), window(seed)), x = at(seed); return new Map(when(seed).map((t, i) => [t, [x[i], y[i]]]).filter(([, p]) => p[1] !== null)); }).filter(run => run.size);
  if (!runs.length) return [];
  const x = [], y = [], low = [], high = [];
  for (const t of [...new Set(runs.flatMap(run => [...run.keys()]))].sort((a, b) => a - b)) {
    const points = runs.filter(run => run.has(t)).map(run => run.get(t)), m = mean(points.map(p => p[1]));
    const s = points.length > 1 ? Math.sqrt(points.reduce((sum, p) => sum + (p[1] - m) ** 2, 0) / (points.length - 1)) : 0;
    x.push(mean(points.map(p => p[0]))); y.push(m); low.push(m - s); high.push(m + s);
  }
  const line = { x, y, uid: `${g}-line`, name: esc(data.short[g]), mode: x.length > 60 ? "lines" : "lines+markers", line: { color: colour(g), dash: dash(g), width: 2 },
    marker: { size: 4, color: colour(g) }, legendgroup: String(g), connectgaps: true };
  if (runs.length < 2) return [line];
  const edge = { x, mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false, legendgroup: String(g) };
  return [{ ...edge, uid: `${g}-low`, y: low }, { ...edge, uid: `${g}-high`, y: high, fill: "tonexty", fillcolor: faded(colour(g), 0.18) }, line];
}
// [name, last value, first value] of each line that is drawn.
const ends = traces => traces.filter(t => /-line$/.test(t.uid)).map(t => [data.short[parseInt(t.uid)], last(t.y), t.y.find(v => v !== null)]);

function top_() {
  document.title = short(data.title, 80) + " · fedmix";
  $("title").textContent = short(data.title, 200);
  $("verdict").textContent = data.glance.verdict;
  $("spent").textContent = data.glance.spent;
  const list = element("ul");
  for (const row of data.glance.wrong.slice(0, 20)) list.append(element("li", short(`${row.run}: ${row.what}`, 400)));
  if (data.glance.wrong.length > 20) list.append(element("li", `and ${data.glance.wrong.length - 20} more`));
  $("wrong").replaceChildren(...(data.glance.wrong.length ? [list] : []));
  $("notes").textContent = data.glance.notes.join(" ");
}

function table() {
  const columns = ["method", ...data.columns], low = new Set(["GiB", "minutes", "rounds", ...Object.keys(data.judged).filter(name => data.judged[name])]);
  const value = (row, column) => Array.isArray(row[column]) ? row[column][0] : row[column];
  const rows = [...data.table];
  if (chosen.sort) {
    const { column, up } = chosen.sort;
    rows.sort((a, b) => {
      const [x, y] = [value(a, column), value(b, column)];
      if (x === null || y === null) return (x === null) - (y === null);  // unknown is last, either way
      return (up ? 1 : -1) * (typeof x === "string" ? x.localeCompare(y) : x - y);
    });
  }
  const best = {};
  for (const [column, lower] of Object.entries(data.judged)) {
    const known = data.table.map(row => value(row, column)).filter(v => v !== null);
    if (known.length > 1) best[column] = lower ? Math.min(...known) : Math.max(...known);
  }
  const head = element("tr");
  for (const column of columns) {
    const cell = element("th", null, { scope: "col" });
    if (chosen.sort && chosen.sort.column === column) cell.setAttribute("aria-sort", chosen.sort.up ? "ascending" : "descending");
    const button = element("button", column, { type: "button" });
    button.onclick = () => { const up = chosen.sort && chosen.sort.column === column ? !chosen.sort.up : column === "method" || low.has(column); chosen.sort = { column, up }; table(); };
    cell.append(button); head.append(cell);
  }
  const body = rows.map(row => {
    const line = element("tr");
    for (const column of columns) {
      const own = row[column];
      const text = column === "method" ? short(own, 120) : Array.isArray(own) ? figures(own[0]) + (own[1] !== null ? ` ± ${figures(own[1])}` : "") : figures_of(column, own);
      const cell = element("td", text);
      if (best[column] !== undefined && value(row, column) === best[column]) cell.className = "best";
      line.append(cell);
    }
    return line;
  });
  const thead = element("thead"); thead.append(head);
  const tbody = element("tbody"); tbody.append(...body);
  $("table").replaceChildren(thead, tbody);
}
const figures_of = (column, own) => column === "rounds" ? String(own) : column === "GiB" && own !== null && own < 1 ? own.toFixed(4) : figures(own);
function save(name, text, type) {
  const link = element("a", null, { download: name, href: URL.createObjectURL(new Blob([text], { type })) });
  link.click(); setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
function csv() {
  const quoted = text => `"${String(text ?? "").replace(/"/g, '""').replace(/^([=+\-@])/, "'$1")}"`;
  const lines = [["method", ...data.columns.flatMap(c => Array.isArray(data.table[0][c]) || data.table.some(r => Array.isArray(r[c])) ? [c, c + " deviation over seeds"] : [c])].map(quoted).join(",")];
  for (const row of data.table) lines.push([quoted(row.method), ...data.columns.flatMap(c => data.table.some(r => Array.isArray(r[c])) ? [row[c] ? row[c][0] : "", row[c] ? row[c][1] ?? "" : ""] : [row[c] ?? ""])].join(","));
  return lines.join("\n") + "\n";
}
function latex() {
  const safe = text => String(text).replace(/[\\{}$&#_%~^]/g, c => c === "\\" ? "\\textbackslash{}" : c === "~" ? "\\textasciitilde{}" : c === "^" ? "\\textasciicircum{}" : "\\" + c);
  const cell = own => own === null || own === undefined ? "--" : Array.isArray(own) ? figures(own[0]) + (own[1] !== null ? ` $\\pm$ ${figures(own[1])}` : "") : own > 0 && own < 1 ? String(Number(own.toPrecision(3))) : figures(own);
  return ["\\begin{tabular}{l" + "r".repeat(data.columns.length) + "}", "\\hline", ["method", ...data.columns].map(safe).join(" & ") + " \\\\", "\\hline",
    ...data.table.map(row => [safe(row.method), ...data.columns.map(c => cell(row[c]))].join(" & ") + " \\\\"), "\\hline", "\\end{tabular}"].join("\n") + "\n";
}

const MEASURES = { as_sent: "as sent accuracy, validation, %", server: "server accuracy, validation, %", no_identity: "no identity accuracy, validation, %", worst_decile: "worst decile of as sent accuracy, validation, %", loss: "training loss" };
function learning() {
  const known = Object.keys(MEASURES).filter(m => data.curves.some(seeds => seeds.some(s => (m === "loss" ? s.every.loss : s[m]).some(v => v !== null))));
  if (!known.includes(chosen.measure)) chosen.measure = known[0] || "loss";
  options($("measure"), known.map(m => [m, MEASURES[m]]), chosen.measure);
  const m = chosen.measure, over = chosen.over;
  const part = s => m === "loss" ? s.every : s;
  const traces = data.curves.flatMap((seeds, g) => banded(g, seeds, s => part(s).round, s => part(s)[over], s => part(s)[m], () => chosen.smooth));
  const found = ends(traces), [best, second] = [...found].sort((a, b) => b[1] - a[1]);
  const where = over === "gib" ? "what was sent" : "rounds", what = MEASURES[m].replace(", %", "");
  const title = m === "loss" || found.length < 2 ? `${what} over ${where}${best ? `: from ${figures(best[2])} to ${figures(best[1])}` : ""}` : `${what} over ${where}: ${best[1] - second[1] < 0.1 ? `${best[0]} and ${second[0]} end level` : `${best[0]} ends highest`}, at ${figures(best[1])}`;
  const note = m !== "loss" ? "" : " FedMix's is its bound over all experts, and is not comparable with another method's.";
  const shown = draw("curves", traces, layout(title, over === "gib" ? "GiB sent, down and up" : "round", MEASURES[m], {}, m + over),
    `${MEASURES[m]} over ${where}; at the end ${some(found.map(([name, v]) => `${name} ${figures(v)}`), 12)}.${note}`);
  $("learning").hidden = !shown;
}

function experts() {
  const with_ = data.runs.map((run, i) => [i, run]).filter(([, run]) => run.maps || run.use);
  $("experts").hidden = !with_.length;
  if (!with_.length) return;
  if (!with_.some(([i]) => i === chosen.run)) chosen.run = with_[0][0];
  options($("run"), with_.map(([i, run]) => [i, run.name]), chosen.run);
  const run = data.runs[chosen.run], maps = run.maps;
  $("frame").disabled = !maps;
  if (maps) {
    const most = maps.frames.length - 1, at = chosen.frame === null ? most : Math.min(chosen.frame, most), frame = maps.frames[at];
    $("frame").max = most; $("frame").value = at; $("frame-is").textContent = frame.round;
    const names = frame.zs[0] ? frame.zs[0].map((_, k) => `expert ${k}`) : [];
    const map = (z, y, title, ylabel, id, text) => draw(id, z.length ? [{ type: "heatmap", z, x: names, y: y.map((_, i) => i), zmin: 0, zmax: 1, colorscale: "Cividis", colorbar: { thickness: 10, title: { text: "q" } },
      text: z.map((row, i) => row.map(() => named(y[i] ?? i, 40))), hovertemplate: "%{text}, %{x}: %{z:.2f}<extra></extra>" }] : [],
      layout(title, "", ylabel, { yaxis: { autorange: "reversed", automargin: true, title: { text: ylabel }, ...ticks(y) } }), text);
    const kinds = { label: "label", client: "client", column: "side information", rotation: "rotation", group: "group" };
    map(frame.zc, maps.values, `q(z|c) after round ${frame.round}: ${sharpness(frame.zc, kinds[maps.side] || "value of c")}`, kinds[maps.side] || "c", "zc", `Which expert the shared posterior gives each ${kinds[maps.side] || "value of c"} to: ${sharp(frame.zc)}.`);
    const rows = maps.clients.map((name, s) => maps.groups ? `${name} (group ${String.fromCharCode(65 + maps.groups[s] % 26)})` : name);
    map(frame.zs, rows, `q(z|s) after round ${frame.round}: ${sharpness(frame.zs, "client")}`, maps.groups ? "client, by true group" : "client", "zs",
      `Which experts each client uses${maps.groups ? ", clients in the order of their true groups" : ""}: ${sharp(frame.zs)}.${maps.left_out ? ` ${maps.left_out} more clients are not shown.` : ""}`);
  } else { draw("zc"); draw("zs"); }
  const use = run.use;
  draw("use", use ? use.use.map((y, k) => ({ x: use.round, y, name: `expert ${k}`, mode: "lines", stackgroup: "one", line: { width: 0.5, color: colour(k) }, fillcolor: faded(colour(k), 0.75) })) : [],
    layout(use ? `use of each expert: from ${figures(Math.min(...use.use.map(last)))} to ${figures(Math.max(...use.use.map(last)))} at the end` : "", "round", "share", { yaxis: { range: [0, 1], automargin: true } }),
    use ? `Share of each expert over rounds; at the end ${use.use.map((y, k) => `expert ${k} ${figures(last(y))}`).join(", ")}.` : "");
  const traces = data.curves.flatMap((seeds, g) => banded(g, seeds, s => s.every.round, s => s.every.round, s => s.every.mib));
  const sent = ends(traces), falls = sent.filter(([, end, start]) => end < 0.99 * start);
  draw("sent", traces, layout(falls.length ? `what a round sends falls as experts are pruned: ${falls[0][0]} from ${figures(falls[0][2])} to ${figures(falls[0][1])} MiB` : "what a round sends: the same in every round", "round", "MiB, down and up", { yaxis: { rangemode: "tozero", automargin: true } }),
    `MiB of a round, first and last: ${some(sent.map(([name, end, start]) => `${name} ${figures(start)} and ${figures(end)}`))}.`);
}
function ticks(names) {
  const step = Math.max(1, Math.ceil(names.length / (window.innerWidth < 600 ? 10 : 24))), at = names.map((_, i) => i).filter(i => i % step === 0);
  return { tickmode: "array", tickvals: at, ticktext: at.map(i => named(names[i], 18)) };
}
const sharpness = (rows, what) => rows.length ? `one expert has ${figures(mean(rows.map(row => Math.max(...row))))} of a ${what}` : "";
function sharp(rows) {
  if (!rows.length) return "none";
  return `the largest share is ${figures(mean(rows.map(row => Math.max(...row))))} on average, 1 being one expert alone`;
}

function divergence() {
  const points = step => Math.max(1, Math.round(chosen.window / step));  // of a curve, in the window's rounds
  const names = [...new Set(data.runs.flatMap(run => run.layers ? Object.keys(run.layers.layers) : []))];
  options($("layer"), [["", "all together"], ...names.map(name => [name, name])], chosen.layer);
  let traces;
  if (chosen.layer) traces = data.runs.filter(run => run.layers && run.layers.layers[chosen.layer]).map(run => ({ x: run.layers.round, y: smoothed(run.layers.layers[chosen.layer], points(run.layers.step)), uid: run.path, name: named(run.name, 40), mode: "lines", line: { color: colour(run.group), dash: dash(run.group) } }));
  else traces = data.curves.flatMap((seeds, g) => banded(g, seeds, s => s.every.round, s => s.every.round, s => s.every.divergence, s => points(s.every.step)));
  const found = chosen.layer ? traces.map(t => [t.name, last(t.y)]) : ends(traces), what = chosen.layer ? `gradient divergence of ${short(chosen.layer, 60)}` : "gradient divergence";
  const [lowest, next] = [...found].sort((a, b) => a[1] - b[1]);
  const alike = next && (next[1] < 1.02 * lowest[1] ? `clients of ${lowest[0]} and ${next[0]} are about as much alike at the end` : `${lowest[0]}'s clients are most alike at the end`);
  $("divergence").hidden = !draw("div", traces, layout(alike ? `${what}: ${alike}` : `${what} of clients' updates over rounds`, "round", "divergence", {}, chosen.layer),
    `Divergence of the clients' updates over rounds, sliding window of ${chosen.window} rounds; lower is more alike. At the end: ${some(found.map(([name, v]) => `${name} ${figures(v)}`), 12)}.`);
}

function median(sorted) { const h = sorted.length >> 1; return sorted.length % 2 ? sorted[h] : (sorted[h - 1] + sorted[h]) / 2; }
const places = names => ({ tickmode: "array", tickvals: names.map((_, i) => i), ticktext: names });
function clients() {
  const runs = data.runs.map((run, i) => [i, run]).filter(([, run]) => run.clients);
  $("clients").hidden = !runs.length;
  if (!runs.length) return;
  const groups = [...new Set(runs.map(([, run]) => run.group))];
  const boxes = groups.map((g, at) => {
    const members = runs.map(([, run]) => run).filter(run => run.group === g), points = members.flatMap(run => run.clients.fine_tuned.map((v, s) => [v, members.length > 1 ? `${run.clients.names[s]}, seed ${run.seed}` : run.clients.names[s]])).filter(([v]) => v !== null);
    return { g, values: points.map(([v]) => 100 * v), names: points.map(([, name]) => named(name, 60)), at };
  }).filter(box => box.values.length);
  const told = boxes.map(({ g, values }) => { const v = [...values].sort((a, b) => a - b); return [`${data.short[g]}: from ${figures(v[0])} to ${figures(v[v.length - 1])}, median ${figures(median(v))}`, v[0], g]; });
  const [worst, next] = [...told].sort((a, b) => b[1] - a[1]), clear = next && worst[1] - next[1] > 0.1;
  draw("spread", boxes.map(({ g, values, names, at }) => ({ type: "box", x: values.map(() => at), y: values, uid: String(g), name: esc(data.short[g]), boxpoints: values.length > 300 ? "outliers" : "all", jitter: 0.5, pointpos: 0, marker: { size: 4, color: colour(g) },
      quartilemethod: "linear", text: names, hovertemplate: "%{text}: %{y:.1f} %<extra></extra>" })),
    layout(`fine-tuned accuracy on test data, client by client: ${clear ? `the worst client is best off with ${data.short[worst[2]]}` : `the worst has ${figures(worst[1])} %`}`, "", "%", { showlegend: false, xaxis: places(boxes.map(({ g }) => named(data.short[g], narrow() ? 14 : 24))) }),
    some(told.map(([text]) => text)) + " per cent.");
  if (!runs.some(([i]) => i === chosen.of)) chosen.of = runs[0][0];
  options($("of"), runs.map(([i, run]) => [i, run.name]), chosen.of);
  const run = data.runs[chosen.of], own = run.clients;
  $("worst-title").textContent = `Worst clients of ${short(run.name, 60)}`;
  const order = own.names.map((_, s) => s).sort((a, b) => own.fine_tuned[a] - own.fine_tuned[b]);
  const head = element("tr"); for (const text of ["client", "fine-tuned, test %", "server, test %", "points"]) head.append(element("th", text, { scope: "col" }));
  const rows = order.slice(0, 10).map(s => { const line = element("tr"); line.append(element("td", short(own.names[s], 80)), element("td", figures(100 * own.fine_tuned[s])), element("td", own.server[s] === null ? "–" : figures(100 * own.server[s])), element("td", own.points[s] ?? "–")); return line; });
  $("worst").replaceChildren(head, ...rows);
  if (chosen.client === null || chosen.client >= own.names.length) chosen.client = order[0];
  options($("client"), own.names.map((name, s) => [s, name]), chosen.client);
  const s = chosen.client, traces = [];
  if (own.labels) traces.push({ type: "bar", x: own.classes.map((_, y) => y), y: own.labels[s], text: own.classes.map(name => named(name, 60)), textposition: "none", hovertemplate: "%{text}: %{y}<extra></extra>", name: "training points of each label", marker: { color: colour(0) } });
  if (own.q) traces.push({ type: "bar", x: own.q[s].map((_, k) => k), y: own.q[s], name: "q(z|s) of each expert", marker: { color: colour(1) }, xaxis: "x2", yaxis: "y2" });
  const both = own.labels && own.q, what = both ? "its labels, its gate" : own.labels ? "its labels" : "its gate (which labels it holds was not recorded)";
  draw("one", traces, layout(`client ${short(own.names[s], 40)}: ${what}`, own.labels ? "label" : "", own.labels ? "points" : "", { xaxis: { ...ticks(own.classes), domain: [0, both ? 0.55 : 1] }, xaxis2: { title: { text: "expert" }, dtick: 1, domain: [both ? 0.66 : 0, 1], anchor: "y2" }, yaxis2: { anchor: "x2", range: [0, 1] }, showlegend: true }, String(s)),
    `Client ${short(own.names[s], 60)}: fine-tuned accuracy ${figures(100 * own.fine_tuned[s])} per cent on test data${own.q ? `, gate ${own.q[s].map((v, k) => `expert ${k} ${figures(v)}`).join(", ")}` : ""}.`);
}

function sweep() {
  const own = data.sweep;
  $("sweep").hidden = !own;
  if (!own) return;
  const keys = Object.keys(own.keys);
  if (!keys.includes(chosen.setting)) chosen.setting = keys[0];
  options($("setting"), keys.map(key => [key, key]), chosen.setting);
  const key = chosen.setting, lines = own.keys[key], one = lines.length === 1;
  const TUNED = "fine-tuned, test", kinds = one ? [TUNED, "server, validation", "no identity, validation"] : [TUNED];
  const traces = lines.flatMap((line, l) => kinds.map((kind, i) => ({ x: line.values, y: line.rows.map(row => row[kind] && row[kind][0]), error_y: { type: "data", array: line.rows.map(row => row[kind] ? row[kind][1] || 0 : 0) },
    name: one ? kind : named(line.name, 40), mode: "lines+markers", line: { color: colour(one ? i : l), dash: dash(one ? 0 : l) } }))).filter(t => t.y.some(v => v !== null));
  const every = lines.flatMap(line => line.values), edge = [Math.min(...every), Math.max(...every)];
  own.beside.forEach((row, i) => { if (row[TUNED]) traces.push({ x: edge, y: [row[TUNED][0], row[TUNED][0]], name: `${named(row.method, 40)}, ${TUNED}`, mode: "lines", line: { color: colour(7), dash: DASHES[1 + i % 4] } }); });
  if (one) traces.push({ x: lines[0].values, y: lines[0].rows.map(row => row.GiB), name: "GiB sent", yaxis: "y2", mode: "lines+markers", line: { color: colour(6), dash: "dot" } });
  const points = lines.flatMap(line => line.rows.map((row, i) => [line.values[i], row[TUNED], line.name])).filter(([, v]) => v), best = points.sort((a, b) => b[1][0] - a[1][0])[0];
  const where = best ? `${key} = ${best[0]}${best[2] ? `, ${best[2]}` : ""}` : "";
  draw("against", traces, layout(best ? `accuracy against ${key}: fine-tuned is highest at ${where}, ${figures(best[1][0])} %` : `accuracy against ${key}`, named(key, 60), one ? "accuracy, %" : "fine-tuned accuracy, test, %", one ? { yaxis2: { overlaying: "y", side: "right", title: { text: "GiB" }, rangemode: "tozero", automargin: true } } : {}, key),
    `Fine-tuned accuracy on test data${one ? " and what was sent" : ""} against ${key}: ${some(lines.flatMap(line => line.rows.map((row, i) => row[TUNED] ? `${line.values[i]}${line.name ? ` (${line.name})` : ""} ${figures(row[TUNED][0])} %${one ? `, ${figures_of("GiB", row.GiB)} GiB` : ""}` : null)).filter(Boolean), 12)}.`);
}

function fresh() {
  const runs = data.runs.filter(run => run.new || run.evaluation);
  $("new").hidden = !runs.length;
  if (!runs.length) return;
  const traces = runs.flatMap(run => {
    const rows = (run.new && run.new.curve) || [];
    const x = rows.length ? rows[0].points : [];
    const without = x.length ? run.new.without.map((row, i) => ({ x, y: x.map(() => 100 * row.accuracy), uid: `${run.path}-${i}`, name: `${named(run.name, 30)}, no labels: ${named(row.what, 40)}`, mode: "lines+markers", marker: { symbol: i + 1, size: 7, color: colour(run.group) }, line: { color: colour(run.group), dash: "dot", width: 1 } })) : [];
    return rows.map((curve, i) => ({ x: curve.points, y: curve.accuracy.map(v => 100 * v), uid: `${run.path}-with-${i}`, name: `${named(run.name, 30)}: ${named(curve.what, 40)}`, mode: "lines+markers", line: { color: colour(run.group), dash: DASHES[i % 2], width: 2 } })).concat(without);
  });
  const ends_ = runs.flatMap(run => ((run.new && run.new.curve) || []).map(curve => ({ run, curve, v: 100 * last(curve.accuracy) }))), best = [...ends_].sort((a, b) => b.v - a.v)[0];
  draw("labelled", traces, layout(best ? `new clients: ${short(best.run.name, 40)} reaches ${figures(best.v)} % with ${last(best.curve.points)} labelled points` : "", "labelled points of a client", "accuracy, %", { xaxis: { type: "category", automargin: true }, legend: { orientation: "h", y: narrow() ? -0.45 : -0.3, x: 0, uirevision: "same" } }),
    `Accuracy on clients that never took part, after their gate, or everything, was trained on a few labelled points: ${some(ends_.map(({ run, curve }) => `${short(run.name, 40)}, ${curve.what}: ${curve.points.map((p, i) => `${figures(100 * curve.accuracy[i])} with ${p}`).join(", ")}`), 4)}.`);
  const head = element("tr"); for (const text of ["run", "clients", "inference", "accuracy %", "worst decile %", "calibration error %"]) head.append(element("th", text, { scope: "col" }));
  const percent = v => v === null || v === undefined ? "–" : figures(100 * v);
  const kinds = run => [...(run.evaluation || []).map(row => ["that took part", `${row.kind}: ${row.what}`, row]), ...((run.new && run.new.without) || []).map(row => [run.new.held_out ? "new, without labels" : "anybody, without labels", row.what, row])];
  const rows = runs.flatMap(run => kinds(run).map(([who, what, row]) => { const line = element("tr"); line.append(element("td", short(run.name, 60)), element("td", who), element("td", short(what, 90)), element("td", percent(row.accuracy)), element("td", percent(row.worst)), element("td", percent(row.ece))); return line; }));
  $("inference").replaceChildren(head, ...rows);
  $("new-note").textContent = [...new Set(runs.map(run => run.new && run.new.note).filter(Boolean))].join(" ");
}

function audit() {
  const runs = data.runs.filter(run => run.audit && run.audit.attacks.length);
  $("audit").hidden = !runs.length;
  if (!runs.length) return;
  const all = runs.flatMap(run => run.audit.attacks.map(attack => ({ run, attack })));
  if (chosen.attack >= all.length) chosen.attack = 0;
  options($("attack"), all.map(({ run, attack }, i) => [i, `${run.name}: ${attack.attack}, ${attack.when}`]), chosen.attack);
  const { run, attack } = all[chosen.attack], truth = [], found = [], text = [];
  (attack.found || []).forEach((row, s) => row && row.forEach((v, y) => { if (run.audit.true[s]) { truth.push(run.audit.true[s][y]); found.push(v); text.push(`client ${named(run.audit.names[s], 30)}, label ${y}`); } }));
  draw("marginals", truth.length ? [{ x: truth, y: found, text, mode: "markers", type: "scatter", name: "a label of a client", marker: { size: 5, color: colour(run.group), opacity: 0.5 }, hovertemplate: "%{text}: true %{x:.2f}, found %{y:.2f}<extra></extra>" }, { x: [0, 1], y: [0, 1], mode: "lines", name: "known exactly", line: { dash: "dot", color: colour(7) } }] : [],
    layout(`label shares as the server reconstructs them: off by ${figures(attack.distance)} on average, a guess by ${figures(run.audit.guess)}`, "true share", "reconstructed", {}, String(chosen.attack)),
    `${attack.attack}, ${attack.when}: distance ${figures(attack.distance)} on average (0 is known exactly), a guess from everybody ${figures(run.audit.guess)}.`);
}

function about() {
  const made = data.runs.map(run => {
    const own = element("details"), a = run.about;
    own.append(element("summary", short(run.name, 120)));
    own.append(element("p", `fedmix ${a.packages.fedmix || "?"}${a.commits && a.commits.length ? ` (commit ${short(a.commits.join(", "), 80)})` : ""}, torch ${a.packages.torch || "?"}, Python ${a.python || "?"}, ${a.cores || "?"} cores, ${a.platform || "?"}; engine ${a.engine || "?"}, started ${a.started || "?"}, ${a.sessions} session${a.sessions === 1 ? "" : "s"}`));
    own.append(element("pre", short(a.command, 2000)));
    own.append(element("pre", Object.entries(a.recipe).map(([key, value]) => `${key} = ${short(JSON.stringify(value), 400)}`).join("\n")));
    own.append(element("p", short(run.path, 400)));
    return own;
  });
  const open = [...$("about").children].map(child => child.open);
  made.forEach((own, i) => { own.open = open[i] || false; });
  $("about").replaceChildren(...made);
}

function missing() { $("missing").textContent = data.missing.length ? `Not on this page: ${data.missing.join("; ")}.` : ""; }

function all() { top_(); missing(); table(); learning(); experts(); divergence(); clients(); sweep(); fresh(); audit(); about(); document.body.dataset.drawn = "yes"; }
function on(id, event, key, then, number) {
  $(id).addEventListener(event, () => { chosen[key] = number ? Number($(id).value) : $(id).value; if ($(id + "-is") && id !== "frame") $(id + "-is").textContent = chosen[key]; then(); });
}
on("measure", "change", "measure", learning); on("over", "change", "over", learning); on("smooth", "input", "smooth", learning, true);
on("run", "change", "run", () => { chosen.frame = null; experts(); }, true); on("of", "change", "of", () => { chosen.client = null; clients(); }, true); on("setting", "change", "setting", sweep); on("frame", "input", "frame", experts, true);
on("layer", "change", "layer", divergence); on("window", "input", "window", divergence, true);
on("client", "change", "client", clients, true); on("attack", "change", "attack", audit, true);
$("csv").onclick = () => save("fedmix.csv", csv(), "text/csv"); $("latex").onclick = () => save("fedmix.tex", latex(), "text/x-tex");
function paint(name) { document.documentElement.dataset.theme = name; $("theme").textContent = name === "dark" ? "light" : "dark"; all(); }
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
      if (answer.status === 200) { data = await answer.json(); known = data.version; all(); }
      const away = answer.status >= 400 ? short(await answer.text(), 200) : "";
      $("live").textContent = away ? `cannot be read now; this is the last that was seen (${away})` : "live, " + new Date().toLocaleTimeString();
    } catch { $("live").textContent = "the server is gone; this is the last that was seen"; }
    setTimeout(look, 2000);
  };
  setTimeout(look, 2000);
}
