"use strict";
// One page from plain numbers. Names come from users: they are set as text, and escaped where Plotly reads markup.
const $ = id => document.getElementById(id);
const COLOURS = { light: ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07d00", "#3a92c4", "#7a7a00", "#666666"],
                  dark:  ["#56b4e9", "#ff9d66", "#2fd6a5", "#e6a4c8", "#e6b83c", "#8ecdf2", "#f0e442", "#b5b5b5"] };
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
let data = JSON.parse($("data").textContent);
const chosen = { measure: "local", over: "round", smooth: 1, run: 0, frame: null, layer: "", window: 10, client: 0, attack: 0, sort: null };

const esc = text => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const short = (text, most = 60) => { text = String(text); return text.length > most ? text.slice(0, most - 1) + "…" : text; };
const named = (text, most) => esc(short(text, most));
const theme = () => document.documentElement.dataset.theme === "dark" ? "dark" : "light";
const colour = i => COLOURS[theme()][i % 8];
const dash = i => DASHES[Math.floor(i / 8) % DASHES.length];
const faded = (hex, alpha) => `rgba(${[1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16)).join(",")},${alpha})`;
const figures = n => n === null || n === undefined ? "–" : Math.abs(n) >= 100 ? n.toFixed(0) : Math.abs(n) >= 10 ? n.toFixed(1) : n.toFixed(2);
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
function layout(title, x, y, more = {}) {
  const dark = theme() === "dark", ink = dark ? "#e6e9ec" : "#1b1f24", grid = dark ? "#333b44" : "#e4e7eb";
  const axis = { gridcolor: grid, zerolinecolor: grid, automargin: true };
  const narrow = window.innerWidth < 600;
  const shape = {
    title: { text: title, font: { size: narrow ? 13 : 15 }, x: 0, xref: "paper", xanchor: "left", automargin: true, yref: "container" },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink, family: "system-ui, sans-serif", size: 12 },
    margin: { l: 50, r: 12, t: 48, b: 45 }, xaxis: { ...axis, title: { text: x } }, yaxis: { ...axis, title: { text: y } },
    legend: { orientation: "h", y: narrow ? -0.34 : -0.22, x: 0 }, hovermode: "closest", dragmode: narrow ? false : "zoom",
  };
  for (const [key, value] of Object.entries(more)) shape[key] = /^[xy]axis/.test(key) ? { ...axis, ...shape[key], ...value } : value;
  return shape;
}
function draw(id, traces, shape, text) {
  const there = traces && traces.length;
  $(id).closest("figure").hidden = !there;
  if (!there) return false;
  Plotly.react($(id), traces, shape, { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d"] });
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
// Mean and band over seeds at the places that the shortest of them has.
function banded(name, g, seeds, at, of, window) {
  const runs = seeds.map(seed => ({ x: at(seed), y: smoothed(of(seed), window) })).filter(run => run.y.some(v => v !== null));
  if (!runs.length) return [];
  const count = Math.min(...runs.map(run => run.y.length)), x = runs[0].x.slice(0, count), mean = [], low = [], high = [];
  for (let i = 0; i < count; i++) {
    const values = runs.map(run => run.y[i]).filter(v => v !== null && v !== undefined);
    if (!values.length) { mean.push(null); low.push(null); high.push(null); continue; }
    const m = values.reduce((a, b) => a + b, 0) / values.length;
    const s = Math.sqrt(values.reduce((a, b) => a + (b - m) ** 2, 0) / values.length);
    mean.push(m); low.push(m - s); high.push(m + s);
  }
  const line = { x, y: mean, name: named(name, 40), mode: count > 60 ? "lines" : "lines+markers", line: { color: colour(g), dash: dash(g), width: 2 },
    marker: { size: 4, color: colour(g) }, legendgroup: String(g), connectgaps: true };
  if (runs.length < 2) return [line];
  const edge = { x, mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false, legendgroup: String(g) };
  return [{ ...edge, y: low }, { ...edge, y: high, fill: "tonexty", fillcolor: faded(colour(g), 0.18) }, line];
}

function top_() {
  document.title = short(data.title, 80) + " · fedmix";
  $("title").textContent = short(data.title, 200);
  $("verdict").textContent = data.glance.verdict;
  $("spent").textContent = data.glance.spent;
  const list = element("ul");
  for (const row of data.glance.wrong.slice(0, 20)) list.append(element("li", short(`${row.run}: ${row.what}`, 400)));
  if (data.glance.wrong.length > 20) list.append(element("li", `and ${data.glance.wrong.length - 20} more`));
  $("wrong").replaceChildren(...(data.glance.wrong.length ? [list] : []));
}

function table() {
  const columns = ["method", ...data.columns], low = new Set(["calibration error", "log loss", "GiB", "minutes", "rounds"]);
  const value = (row, column) => Array.isArray(row[column]) ? row[column][0] : row[column];
  const rows = [...data.table];
  if (chosen.sort) {
    const { column, up } = chosen.sort;
    rows.sort((a, b) => {
      const [x, y] = [value(a, column), value(b, column)];
      const order = x === null ? 1 : y === null ? -1 : typeof x === "string" ? x.localeCompare(y) : x - y;
      return (up ? 1 : -1) * order;
    });
  }
  const best = {};
  for (const column of ["local", "server", "global", "worst decile", "calibration error", "log loss"]) {
    const known = data.table.map(row => value(row, column)).filter(v => v !== null);
    if (known.length > 1) best[column] = low.has(column) ? Math.min(...known) : Math.max(...known);
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
  const lines = [["method", ...data.columns.flatMap(c => Array.isArray(data.table[0][c]) || data.table.some(r => Array.isArray(r[c])) ? [c, c + " std"] : [c])].map(quoted).join(",")];
  for (const row of data.table) lines.push([quoted(row.method), ...data.columns.flatMap(c => data.table.some(r => Array.isArray(r[c])) ? [row[c] ? row[c][0] : "", row[c] ? row[c][1] ?? "" : ""] : [row[c] ?? ""])].join(","));
  return lines.join("\n") + "\n";
}
function latex() {
  const safe = text => String(text).replace(/[\\{}$&#_%~^]/g, c => c === "\\" ? "\\textbackslash{}" : c === "~" ? "\\textasciitilde{}" : c === "^" ? "\\textasciicircum{}" : "\\" + c);
  const cell = own => own === null || own === undefined ? "--" : Array.isArray(own) ? figures(own[0]) + (own[1] !== null ? ` $\\pm$ ${figures(own[1])}` : "") : figures(own);
  return ["\\begin{tabular}{l" + "r".repeat(data.columns.length) + "}", "\\hline", ["method", ...data.columns].map(safe).join(" & ") + " \\\\", "\\hline",
    ...data.table.map(row => [safe(row.method), ...data.columns.map(c => cell(row[c]))].join(" & ") + " \\\\"), "\\hline", "\\end{tabular}"].join("\n") + "\n";
}

const MEASURES = { local: "local accuracy, %", server: "server accuracy, %", global: "global accuracy, %", "worst decile": "worst decile of local accuracy, %", loss: "training loss" };
function learning() {
  const known = Object.keys(MEASURES).filter(m => data.curves.some(seeds => seeds.some(s => (m === "loss" ? s.every.loss : s[m]).some(v => v !== null))));
  if (!known.includes(chosen.measure)) chosen.measure = known[0] || "loss";
  options($("measure"), known.map(m => [m, MEASURES[m]]), chosen.measure);
  const m = chosen.measure, over = chosen.over;
  const traces = data.curves.flatMap((seeds, g) => banded(data.groups[g], g, seeds, s => m === "loss" ? s.every[over] : s[over], s => m === "loss" ? s.every.loss : s[m], chosen.smooth));
  const ends = data.curves.map((seeds, g) => { const v = seeds.map(s => last(m === "loss" ? s.every.loss : s[m])).filter(v => v !== null); return v.length ? `${short(data.groups[g], 60)} ${figures(v.reduce((a, b) => a + b, 0) / v.length)}` : null; }).filter(Boolean);
  const where = over === "gib" ? "what was sent" : "rounds";
  const shown = draw("curves", traces, layout(`${MEASURES[m].replace(", %", "")} over ${where}`, over === "gib" ? "GiB sent, down and up" : "round", MEASURES[m]),
    `${MEASURES[m]} over ${where}${m === "loss" ? "" : ", on validation data"}; at the end ${ends.join(", ")}.`);
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
    map(frame.zc, maps.values, `q(z|c) after round ${frame.round}`, kinds[maps.side] || "c", "zc", `Which expert the shared posterior gives each ${kinds[maps.side] || "value of c"} to: ${sharp(frame.zc)}.`);
    const rows = maps.clients.map((name, s) => maps.groups ? `${name} (group ${String.fromCharCode(65 + maps.groups[s] % 26)})` : name);
    map(frame.zs, rows, `q(z|s) after round ${frame.round}`, maps.groups ? "client, by true group" : "client", "zs",
      `Which experts each client uses${maps.groups ? ", clients in the order of their true groups" : ""}: ${sharp(frame.zs)}.${maps.left_out ? ` ${maps.left_out} more clients are not shown.` : ""}`);
  } else { draw("zc"); draw("zs"); }
  const use = run.use;
  draw("use", use ? use.use.map((y, k) => ({ x: use.round, y, name: `expert ${k}`, mode: "lines", stackgroup: "one", line: { width: 0.5, color: colour(k) }, fillcolor: faded(colour(k), 0.75) })) : [],
    layout("how much each expert is used", "round", "share", { yaxis: { range: [0, 1], automargin: true } }),
    use ? `Share of each expert over rounds; at the end ${use.use.map((y, k) => `expert ${k} ${figures(last(y))}`).join(", ")}.` : "");
  const traces = data.curves.flatMap((seeds, g) => banded(data.groups[g], g, seeds, s => s.every.round, s => s.every.mib, 1));
  draw("sent", traces, layout("what a round sends", "round", "MiB, down and up", { yaxis: { rangemode: "tozero", automargin: true } }),
    "MiB of a round over rounds; it falls where experts are pruned.");
}
function ticks(names) {
  const step = Math.max(1, Math.ceil(names.length / (window.innerWidth < 600 ? 10 : 24))), at = names.map((_, i) => i).filter(i => i % step === 0);
  return { tickmode: "array", tickvals: at, ticktext: at.map(i => named(names[i], 18)) };
}
function sharp(rows) {
  if (!rows.length) return "none";
  const mean = rows.reduce((a, row) => a + Math.max(...row), 0) / rows.length;
  return `the largest share is ${figures(mean)} on average, 1 being one expert alone`;
}

function divergence() {
  const names = [...new Set(data.runs.flatMap(run => run.layers ? Object.keys(run.layers.layers) : []))];
  options($("layer"), [["", "all together"], ...names.map(name => [name, name])], chosen.layer);
  let traces;
  if (chosen.layer) traces = data.runs.filter(run => run.layers && run.layers.layers[chosen.layer]).map(run => ({ x: run.layers.round, y: smoothed(run.layers.layers[chosen.layer], Math.ceil(chosen.window / 3)), name: named(run.name, 40), mode: "lines", line: { color: colour(run.group), dash: dash(run.group) } }));
  else traces = data.curves.flatMap((seeds, g) => banded(data.groups[g], g, seeds, s => s.every.round, s => s.every.divergence, chosen.window));
  const what = chosen.layer ? `gradient divergence of ${named(chosen.layer, 60)}` : "gradient divergence";
  $("divergence").hidden = !draw("div", traces, layout(what, "round", "divergence of clients' updates"), `Divergence of the clients' updates over rounds, sliding window of ${chosen.window}; lower is more alike.`);
}

function clients() {
  const runs = data.runs.filter(run => run.clients);
  $("clients").hidden = !runs.length;
  if (!runs.length) return;
  draw("spread", runs.map(run => ({ type: "box", y: run.clients.local.map(v => v === null ? null : 100 * v), name: named(run.name, 30), boxpoints: run.clients.names.length > 300 ? "outliers" : "all", jitter: 0.5, pointpos: 0, marker: { size: 4, color: colour(run.group) },
      text: run.clients.names.map(name => named(name, 40)), hovertemplate: "%{text}: %{y:.1f} %<extra></extra>" })),
    layout("local accuracy, client by client", "", "%", { showlegend: false }),
    runs.map(run => { const v = run.clients.local.filter(v => v !== null).sort((a, b) => a - b); return `${short(run.name, 60)}: from ${figures(100 * v[0])} to ${figures(100 * v[v.length - 1])}, median ${figures(100 * v[Math.floor(v.length / 2)])}`; }).join("; ") + " per cent.");
  const run = data.runs[chosen.run] && data.runs[chosen.run].clients ? data.runs[chosen.run] : runs[0], own = run.clients;
  $("worst-title").textContent = `Worst clients of ${short(run.name, 60)}`;
  const order = own.names.map((_, s) => s).sort((a, b) => own.local[a] - own.local[b]);
  const head = element("tr"); for (const text of ["client", "local %", "server %", "points"]) head.append(element("th", text, { scope: "col" }));
  const rows = order.slice(0, 10).map(s => { const line = element("tr"); line.append(element("td", short(own.names[s], 80)), element("td", figures(100 * own.local[s])), element("td", own.server[s] === null ? "–" : figures(100 * own.server[s])), element("td", own.points[s] ?? "–")); return line; });
  $("worst").replaceChildren(head, ...rows);
  if (chosen.client >= own.names.length || chosen.client === null) chosen.client = order[0];
  options($("client"), own.names.map((name, s) => [s, name]), chosen.client);
  const s = chosen.client, traces = [];
  if (own.labels) traces.push({ type: "bar", x: own.classes.map(name => named(name, 20)), y: own.labels[s], name: "training points of each label", marker: { color: colour(0) } });
  if (own.q) traces.push({ type: "bar", x: own.q[s].map((_, k) => `expert ${k}`), y: own.q[s], name: "q(z|s)", marker: { color: colour(1) }, xaxis: "x2", yaxis: "y2" });
  const both = own.labels && own.q;
  draw("one", traces, layout(`client ${named(own.names[s], 40)}: its labels, its gate`, "", "points", { xaxis: { type: "category", domain: [0, both ? 0.55 : 1] }, xaxis2: { type: "category", domain: [both ? 0.66 : 0, 1], anchor: "y2" }, yaxis2: { anchor: "x2", range: [0, 1] }, showlegend: true }),
    `Client ${short(own.names[s], 60)}: local accuracy ${figures(100 * own.local[s])} per cent${own.q ? `, gate ${own.q[s].map((v, k) => `expert ${k} ${figures(v)}`).join(", ")}` : ""}.`);
}

function sweep() {
  const own = data.sweep;
  $("sweep").hidden = !own;
  if (!own) return;
  const traces = ["local", "server", "global"].map((kind, i) => ({ x: own.values, y: own.rows.map(row => row[kind] && row[kind][0]), error_y: { type: "data", array: own.rows.map(row => row[kind] ? row[kind][1] || 0 : 0) }, name: kind, mode: "lines+markers", line: { color: colour(i) } })).filter(t => t.y.some(v => v !== null));
  traces.push({ x: own.values, y: own.rows.map(row => row.GiB), name: "GiB sent", yaxis: "y2", mode: "lines+markers", line: { color: colour(7), dash: "dot" } });
  draw("against", traces, layout(`accuracy against ${named(own.key, 60)}`, named(own.key, 60), "%", { yaxis2: { overlaying: "y", side: "right", title: { text: "GiB" }, rangemode: "tozero", automargin: true } }), `Test accuracy and what was sent against ${own.key}.`);
}

function fresh() {
  const runs = data.runs.filter(run => run.new || run.evaluation);
  $("new").hidden = !runs.length;
  if (!runs.length) return;
  const traces = runs.flatMap(run => {
    const rows = (run.new && run.new.curve) || [];
    const x = rows.length ? rows[0].points : [];
    const without = x.length ? (run.new.without || []).map((row, i) => ({ x, y: x.map(() => 100 * row.accuracy), name: `${named(run.name, 30)}, no labels: ${named(row.what, 40)}`, mode: "lines", line: { color: colour(run.group + i + 2), dash: "dot" } })) : [];
    return without.concat(rows.map((curve, i) => ({ x: curve.points, y: curve.accuracy.map(v => 100 * v), name: `${named(run.name, 30)}: ${named(curve.what, 40)}`, mode: "lines+markers", line: { color: colour(run.group), dash: DASHES[i % 5] } })));
  });
  draw("labelled", traces, layout("new clients, over how many labelled points they have", window.innerWidth < 600 ? "" : "labelled points of a client", "accuracy, %", { xaxis: { type: "category", automargin: true } }), "Accuracy on clients that never took part, after their gate, or everything, was trained on a few labelled points.");
  const head = element("tr"); for (const text of ["run", "inference", "accuracy %", "worst decile %"]) head.append(element("th", text, { scope: "col" }));
  const kinds = run => [...(run.evaluation || []), ...((run.new && run.new.without) || []).map(row => ({ kind: "new clients, no labels", what: row.what, accuracy: row.accuracy, worst: null }))];
  const rows = runs.flatMap(run => kinds(run).map(row => { const line = element("tr"); line.append(element("td", short(run.name, 60)), element("td", short(`${row.kind}: ${row.what}`, 90)), element("td", row.accuracy === null ? "–" : figures(100 * row.accuracy)), element("td", row.worst === null || row.worst === undefined ? "–" : figures(100 * row.worst))); return line; }));
  $("inference").replaceChildren(head, ...rows);
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
    layout("label shares: true, and as the server reconstructs them", "true share", "reconstructed", {}),
    `${attack.attack}, ${attack.when}: distance ${figures(attack.distance)} on average (0 is known exactly), a guess from everybody ${figures(run.audit.guess)}.`);
}

function about() {
  const made = data.runs.map(run => {
    const own = element("details"), a = run.about;
    own.append(element("summary", short(run.name, 120)));
    own.append(element("p", `fedmix ${a.packages.fedmix || "?"}, torch ${a.packages.torch || "?"}, Python ${a.python || "?"}, ${a.cores || "?"} cores, ${a.platform || "?"}; engine ${a.engine || "?"}, started ${a.started || "?"}, ${a.sessions} session${a.sessions === 1 ? "" : "s"}`));
    own.append(element("pre", short(a.command, 2000)));
    own.append(element("pre", Object.entries(a.recipe).map(([key, value]) => `${key} = ${short(JSON.stringify(value), 400)}`).join("\n")));
    own.append(element("p", short(run.path, 400)));
    return own;
  });
  const open = [...$("about").children].map(child => child.open);
  made.forEach((own, i) => { own.open = open[i] || false; });
  $("about").replaceChildren(...made);
}

function all() { top_(); table(); learning(); experts(); divergence(); clients(); sweep(); fresh(); audit(); about(); document.body.dataset.drawn = "yes"; }
function on(id, event, key, then, number) {
  $(id).addEventListener(event, () => { chosen[key] = number ? Number($(id).value) : $(id).value; if ($(id + "-is") && id !== "frame") $(id + "-is").textContent = chosen[key]; then(); });
}
on("measure", "change", "measure", learning); on("over", "change", "over", learning); on("smooth", "input", "smooth", learning, true);
on("run", "change", "run", () => { chosen.frame = null; chosen.client = null; experts(); clients(); }, true); on("frame", "input", "frame", experts, true);
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
      $("live").textContent = "live, " + new Date().toLocaleTimeString();
    } catch { $("live").textContent = "the server is gone; this is the last that was seen"; }
    setTimeout(look, 2000);
  };
  setTimeout(look, 2000);
}
