"use strict";
const { n, n_layers, n_heads } = ropelens.data("overview");
const metrics = range(n).map((i) => {
  const data = ropelens.data(`scores-${i}`);
  return { ...data, all: ropelens.floats(data.values), n_bands: data.values.shape[2] };
});
const rowsOf = { layers: n_layers, heads: n_layers * n_heads };

// The rows of the view: what stands in them, what they are called, and how they are sorted.
function rows(metric, view, importance) {
  const { all, n_bands } = metric;
  const head = (at) => {
    const row = Array.from(all.subarray(at * n_bands, (at + 1) * n_bands));
    if (!importance) return row;
    const largest = Math.max(...row.filter((v) => !Number.isNaN(v)).map(Math.abs)) || 1;
    return row.map((v) => Math.abs(v) / largest);
  };
  if (view === 1) return range(rowsOf.heads).map((at) => ({ at, name: `${Math.floor(at / n_heads)}.${at % n_heads}`, row: head(at), key: ["heads", at] }));
  if (view > 1) return range(n_layers).map((layer) => ({ at: layer * n_heads + view - 2, name: String(layer), row: head(layer * n_heads + view - 2), key: ["heads", layer * n_heads + view - 2] }));
  return range(n_layers).map((layer) => {
    const heads = range(n_heads).map((h) => head(layer * n_heads + h));
    const row = range(n_bands).map((b) => heads.reduce((sum, one) => sum + one[b], 0) / n_heads);
    return { at: null, layer, name: String(layer), row, key: ["layers", layer] };
  });
}

for (const metric of metrics)
  for (const which of Object.values(metric.order))
    for (const name of ["centroid", "effective", "share"]) if (which[name]) which[name] = ropelens.floats(which[name]);

function sorted(metric, found) {
  const by = byId("sort").value;
  if (!by) return found;
  const value = ({ key: [which, at] }) => metric.order[which][by][at];
  const last = (v) => (Number.isNaN(v) ? Infinity : v);
  return [...found].sort((a, b) => last(value(a)) - last(value(b)));
}

const shownRows = [];
function drawMaps() {
  const view = byId("view").selectedIndex, importance = byId("show").value === "importance";
  metrics.forEach((metric, i) => {
    const found = (shownRows[i] = sorted(metric, rows(metric, view, importance)));
    const z = found.map(({ row }) => row), [zmin, zmax] = importance ? [0, 1] : ropelens.ends(z.flat());
    ropelens.draw(`map-${i}`, metric.figures.map, ([trace], layout, narrow) => {
      const many = found.length > 64, every = Math.max(1, Math.ceil(found.length / (many ? 30 : 15)));
      const at = range(found.length).filter((r) => r % every === 0);
      Object.assign(trace, { z, zmin, zmax, y: range(found.length) });
      if (importance) trace.colorscale = "Cividis";
      const wavelengths = found.map(({ at, layer }) => metric.wavelengths[layer ?? Math.floor(at / n_heads)]);
      trace.customdata = wavelengths;
      trace.text = found.map(({ name, row }) => row.map(() => (view === 1 ? `head ${name}` : `layer ${name}`)));
      trace.hovertemplate = "%{text}, band %{x}<br>%{customdata} tokens a turn<br>%{z:.4g}<extra></extra>";
      layout.height = many ? 120 + 5 * found.length : Math.max(320, 110 + 13 * found.length);
      layout.yaxis = { ...layout.yaxis, tickmode: "array", tickvals: at, ticktext: at.map((r) => found[r].name),
        title: { text: view === 1 ? "head" : "layer", standoff: 8 }, autorange: byId("sort").value || view === 1 ? "reversed" : true };
      if (narrow) layout.xaxis = { ...layout.xaxis, tickfont: { size: 10 } };
    });
  });
}

function fillTable() {
  const metric = metrics[0], { centroid, effective, top, share } = metric.order.heads;
  const link = (at) => {
    const a = document.createElement("a"), name = `${Math.floor(at / n_heads)}.${at % n_heads}`;
    a.href = `head.html#${name}`;
    a.textContent = `layer ${Math.floor(at / n_heads)}, head ${at % n_heads}`;
    return a;
  };
  const { rest } = metric, others = ropelens.floats(rest);
  byId("of").textContent = metric.name;
  byId("all-heads").replaceChildren(...sorted(metric, rows(metric, 1, false)).map(({ at, row }) => {
    const tr = document.createElement("tr"), th = document.createElement("th");
    th.scope = "row";
    th.append(link(at));
    const total = row.reduce((sum, v) => sum + (v || 0), 0) + others[at];
    const cells = [ropelens.number(total), ropelens.tokens(centroid[at]), effective[at].toFixed(1)];
    cells.push(`${top[at]} (${Math.round(100 * share[at])}%)`);
    tr.append(th, ...cells.map((text) => Object.assign(document.createElement("td"), { textContent: text })));
    return tr;
  }));
}

ropelens.options(byId("view"), ["layers (mean over heads)", "every head", ...range(n_heads).map((h) => `layers, head ${h}`)]);
for (const id of ["view", "show"]) byId(id).addEventListener("change", drawMaps);
byId("sort").addEventListener("change", () => { drawMaps(); fillTable(); });
drawMaps();
fillTable();
ropelens.onTheme(drawMaps);
metrics.forEach((metric, i) => byId(`map-${i}`).on("plotly_click", ({ points: [point] }) => {
  const { at, layer } = shownRows[i][point.y];
  location.href = `head.html#${layer ?? Math.floor(at / n_heads)}.${at === null ? 0 : at % n_heads}`;
}));
