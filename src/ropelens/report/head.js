"use strict";
const data = ropelens.data("head"), { n_layers, n_heads } = data;
const metrics = range(data.n).map((i) => {
  const found = ropelens.data(`scores-${i}`);
  return { ...found, all: ropelens.floats(found.values), others: ropelens.floats(found.rest), n_bands: found.values.shape[2] };
});
const kinds = data.kinds.map((kind) => ({ ...kind, all: ropelens.floats(kind.values) }));
const place = () => [byId("layer").selectedIndex, byId("head").selectedIndex];
document.body.dataset.waits = "yes";

function drawSpectra(layer, head) {
  const at = layer * n_heads + head;
  metrics.forEach((metric, i) => {
    const { all, n_bands } = metric;
    const exists = range(n_bands).filter((b) => !Number.isNaN(all[at * n_bands + b]));
    const y = exists.map((b) => all[at * n_bands + b]), labels = exists.map((b) => metric.wavelengths[layer][b]);
    if (metric.has_rest[layer]) { y.push(metric.others[at]); labels.push("rest"); }
    const color = y.map((v) => (metric.metric === "entropy" && v > 0 ? ropelens.theme.above : ropelens.theme.below));
    ropelens.draw(`spectrum-${i}`, metric.figures.spectrum, ([trace], layout, narrow) => {
      Object.assign(trace, { x: range(y.length), y, customdata: labels, marker: { color }, error_y: undefined });
      const every = Math.max(1, Math.ceil((y.length - 1) / (narrow ? 6 : 8)));
      const ticks = range(y.length).filter((b) => b % every === 0);
      layout.xaxis = { ...layout.xaxis, title: { text: "wavelength (tokens), fast to slow" }, tickmode: "array",
        tickvals: ticks, ticktext: ticks.map((b) => labels[b]) };
      layout.yaxis = { ...layout.yaxis, title: undefined };
    });
  });
}

const nth = (n) => `${n}${n % 10 === 1 && n % 100 !== 11 ? "st" : n % 10 === 2 && n % 100 !== 12 ? "nd" : n % 10 === 3 && n % 100 !== 13 ? "rd" : "th"}`;

function describe(layer, head) {
  const at = layer * n_heads + head;
  const parts = metrics.map(({ name, order: { heads }, all, n_bands, others }) => {
    const total = range(n_bands).reduce((sum, b) => sum + (all[at * n_bands + b] || 0), 0) + others[at];
    const bands = +ropelens.floats(heads.effective)[at].toPrecision(2);
    return `${name} ${ropelens.number(total)}, about a wavelength of ${ropelens.tokens(ropelens.floats(heads.centroid)[at])} tokens, ` +
      `spread as over ${bands} band${bands === 1 ? "" : "s"}`;
  });
  byId("summary").textContent = `Layer ${layer}, head ${head}: ${parts.slice(0, 2).join("; ")}.`;
  document.title = `Head ${layer}.${head}: ${document.title.replace(/^.*?: /, "")}`;
  if (!byId("kinds")) return;
  const table = document.createElement("table"), body = document.createElement("tbody");
  kinds.forEach(({ name, says, all }) => {
    const value = all[at], rank = 1 + Array.from(all).filter((v) => v > value).length;
    const tr = document.createElement("tr"), th = document.createElement("th");
    th.scope = "row";
    th.textContent = name;
    const bar = Object.assign(document.createElement("div"), { className: "gauge" });
    bar.append(document.createElement("div"));
    bar.firstChild.style.width = `${100 * Math.min(1, Math.abs(value || 0))}%`;
    bar.firstChild.style.background = value < 0 ? ropelens.theme.below : ropelens.theme.above;
    const cells = [bar, Number.isNaN(value) ? "not readable" : value.toFixed(2), Number.isNaN(value) ? "" : `${nth(rank)} of ${all.length}`, says];
    tr.append(th, ...cells.map((cell) => { const td = document.createElement("td"); td.append(cell); return td; }));
    body.append(tr);
  });
  table.append(body);
  const scroll = Object.assign(document.createElement("div"), { className: "scroll" });
  scroll.append(table);
  byId("kinds").replaceChildren(scroll);
}

function showExamples(layer, head) {
  const known = data.shown.includes(`${layer}.${head}`);
  byId("to-attention").hidden = !known;
  byId("to-attention").href = `attention.html#${layer}.${head}`;
  const list = byId("examples");
  if (!list) return;
  const quoted = (at) => Object.assign(document.createElement("q"), { textContent: ropelens.shown(data.tokens[at]) });
  const found = data.examples[layer]?.[head] ?? [];
  list.replaceChildren(...(found.length ? found : [null]).map((example) => {
    const li = document.createElement("li");
    if (!example) { li.append("no query of the text looks at one token in particular"); return li; }
    const [query, key, value] = example;
    const from = known ? Object.assign(document.createElement("a"), { href: `attention.html#${layer}.${head}.${query}` }) : document.createElement("span");
    from.append(quoted(query), ` at ${query}`);
    li.append(from, " looks at ", quoted(key), ` at ${key}: ${Math.round(100 * value)}%`);
    return li;
  }));
}

async function drawKernel(layer, head) {
  if (!byId("kernel-map")) return;
  const [looks, found] = await Promise.all([ropelens.load("kernel"), ropelens.load(`kernel-${layer}`)]);
  const distances = looks.distances, which = byId("which-kernel")?.value ?? "kernel", n = distances.length;
  const row = ropelens.rows(found[which]);
  const table = range(n).map((d) => row(head * n + d)); // distance x band
  const z = range(found.n_bands).map((b) => table.map((bands) => bands[b]));
  const high = Math.max(...z.flat().map(Math.abs)) || 1, labels = metrics[0].wavelengths[layer];
  ropelens.draw("kernel-map", looks.figures.heatmap, ([trace], layout) => {
    Object.assign(trace, { z, zmin: -high, zmax: high, y: range(found.n_bands) });
    trace.customdata = range(found.n_bands).map((b) => distances.map(() => labels[b]));
    trace.text = range(found.n_bands).map(() => distances.map(String));
    const every = Math.max(1, Math.floor(found.n_bands / 8)), ticks = range(found.n_bands).filter((b) => b % every === 0);
    layout.yaxis = { ...layout.yaxis, tickvals: ticks, ticktext: ticks.map((b) => labels[b]) };
  });
  ropelens.draw("kernel-lines", looks.figures.lines, (traces, layout) => {
    traces.forEach((trace, i) => {
      const all = ropelens.floats(found[`${i ? "measured" : "kernel"}_total`]);
      Object.assign(trace, { x: range(n), y: Array.from(all.subarray(head * n, (head + 1) * n)), customdata: distances.map(String) });
    });
    layout.yaxis = { ...layout.yaxis, title: undefined };
  });
}

async function show() {
  const [layer, head] = place();
  ropelens.goTo(layer, head);
  drawSpectra(layer, head);
  describe(layer, head);
  showExamples(layer, head);
  await drawKernel(layer, head);
}

function fromHash() {
  const [layer, head] = ropelens.place();
  const known = layer < n_layers && head < n_heads;
  byId("layer").selectedIndex = known ? layer : data.start[0];
  byId("head").selectedIndex = known ? head : data.start[1];
  return show();
}

ropelens.options(byId("layer"), range(n_layers));
ropelens.options(byId("head"), range(n_heads));
for (const id of ["layer", "head", "which-kernel"]) byId(id)?.addEventListener("change", show);
addEventListener("hashchange", fromHash);
ropelens.onTheme(show);
fromHash().then(ropelens.ready);
