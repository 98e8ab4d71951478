"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const byId = (id) => document.getElementById(id);
const metrics = Object.keys(data.views);
const config = { responsive: true, displaylogo: false, displayModeBar: false };

function options(select, names, chosen) {
  names.forEach((name, i) => select.add(new Option(name, i, false, i === chosen)));
}
const range = (n) => Array.from({ length: n }, (_, i) => i);

// Figures come as Python made them; the page adds its own colours.
function themed(id) {
  const figure = data.figures[id];
  const [ink, line] = dark.matches ? ["#e6edf3", "#6b7682"] : ["#24292f", "#8c959f"];
  const layout = { ...figure.layout, title: undefined, autosize: true };
  layout.font = { ...layout.font, color: ink };
  layout.margin = { l: 48, r: 8, t: 12, b: 48 };
  layout.hoverlabel = { bgcolor: dark.matches ? "#2b323a" : "#ffffff", font: { color: ink }, bordercolor: line };
  for (const axis of Object.keys(layout).filter((key) => /^[xy]axis/.test(key)))
    layout[axis] = { ...layout[axis], linecolor: line, tickcolor: line, fixedrange: true };
  const traces = figure.data.map((trace) =>
    Array.isArray(trace.colorscale) && trace.zmin < 0
      ? { ...trace, colorscale: data.diverging[dark.matches ? "dark" : "light"] }
      : { ...trace });
  return [traces, layout];
}

function drawHeat() {
  const view = byId("view").selectedIndex;
  for (const metric of metrics) {
    const { z, range: [zmin, zmax] } = data.views[metric][view];
    const [[trace, ...rest], layout] = themed("heat-" + metric);
    if (trace.colorbar) trace.colorbar = { ...trace.colorbar, title: undefined };
    Plotly.react("heat-" + metric, [{ ...trace, z, zmin, zmax }, ...rest], layout, config);
  }
}

function drawSpectrum() {
  const layer = byId("layer").selectedIndex, head = byId("head-of-layer").selectedIndex;
  for (const metric of metrics) {
    const y = data.views[metric][head + 1].z[layer];
    const [[trace], layout] = themed("spectrum-" + metric);
    const customdata = data.figures["heat-" + metric].data[0].customdata[layer]; // wavelengths, as text
    const color = y.map((v) => (metric === "entropy" && v > 0 ? data.colours.above : data.colours.below));
    if (layout.xaxis.tickvals)
      layout.xaxis = { ...layout.xaxis, ticktext: layout.xaxis.tickvals.map((band) => customdata[band] ?? "rest") };
    layout.yaxis = { ...layout.yaxis, title: undefined };
    Plotly.react("spectrum-" + metric, [{ ...trace, y, customdata, marker: { color } }], layout, config);
  }
}

function drawAttribution() {
  const [traces, layout] = themed("attribution");
  const narrow = byId("attribution").clientWidth < 600;
  traces[0].colorbar = { ...traces[0].colorbar, title: undefined, orientation: "h", y: 1, yanchor: "bottom", len: 0.6, x: 0, xanchor: "left", nticks: 5, tickangle: 0 };
  layout.margin.t = 56;
  layout.yaxis.title = undefined;
  if (narrow) {
    Object.assign(traces[0].colorbar, { tickvals: [traces[0].zmin, 0, traces[0].zmax], tickformat: ".1g", len: 0.9 });
    const every = (labels) => labels.filter((_, i) => i % 3 === 0);
    layout.xaxis = { ...layout.xaxis, tickvals: every(layout.xaxis.tickvals), ticktext: every(layout.xaxis.ticktext) };
    layout.xaxis2 = { ...layout.xaxis2, title: undefined, showticklabels: false, ticks: "" };
  }
  Plotly.react("attribution", traces, layout, config);
}

function shadeTokens() {
  const { values } = data.groups[byId("group").selectedIndex];
  const largest = Math.max(...values.map(Math.abs)) || 1;
  byId("tokens").querySelectorAll("span").forEach((span, position) => {
    const value = values[position];
    const alpha = Math.sqrt(Math.abs(value) / largest);
    span.title = `${position}: ${value}`;
    const colour = value >= 0 ? data.colours.above : data.colours.below;
    const hex = Math.round(255 * alpha).toString(16).padStart(2, "0");
    span.style.background = alpha < 0.03 ? "" : colour + hex;
  });
}

function showHead(layer, head) {
  byId("layer").selectedIndex = layer;
  byId("head-of-layer").selectedIndex = head;
  drawSpectrum();
}

const heads = range(data.n_heads).map((h) => `head ${h}`);
options(byId("view"), ["all heads (mean)", ...heads], 0);
options(byId("layer"), range(data.n_layers), data.layer);
options(byId("head-of-layer"), range(data.n_heads), data.head);
options(byId("group"), data.groups.map((group) => group.name), 0);
byId("view").addEventListener("change", drawHeat);
byId("layer").addEventListener("change", drawSpectrum);
byId("head-of-layer").addEventListener("change", drawSpectrum);
byId("group").addEventListener("change", shadeTokens);
document.querySelectorAll("button[data-layer]").forEach((button) =>
  button.addEventListener("click", () => {
    showHead(Number(button.dataset.layer), Number(button.dataset.head));
    byId("view").selectedIndex = Number(button.dataset.head) + 1;
    drawHeat();
    byId("head").scrollIntoView({ behavior: "smooth" });
  }));

function draw() {
  drawHeat();
  drawSpectrum();
  drawAttribution();
}
draw();
dark.addEventListener("change", draw);
for (const metric of metrics)
  byId("heat-" + metric).on("plotly_click", ({ points: [point] }) => {
    const view = byId("view").selectedIndex;
    showHead(point.y, view > 0 ? view - 1 : byId("head-of-layer").selectedIndex);
  });

// The strongest key that is neither the first nor near the query is what one came to see.
const attention = data.groups[0].values;
const far = attention.map((value, i) => (i > 0 && i < attention.length - 32 ? value : -1));
const strongest = byId("tokens").querySelectorAll("span")[far.indexOf(Math.max(...far))];
if (strongest) byId("tokens").scrollTop = strongest.offsetTop - byId("tokens").offsetTop - 80;
document.body.dataset.ready = "yes";
