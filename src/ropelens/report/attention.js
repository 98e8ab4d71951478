"use strict";
const data = ropelens.data("attention");
const entry = () => data.entries[byId("entry").selectedIndex];
document.body.dataset.waits = "yes";
let query = 0, values = [], drawnText = -1;

const named = ({ layer, head, name }) => `layer ${layer}, head ${head}${name ? `: ${name}` : ""}`;
const label = (token, at) => {
  const shown = ropelens.shown(token.trim() || token.replaceAll(" ", "␣"));
  const short = shown.length <= 16 ? shown : `${shown.slice(0, 15)}…`;
  return `${short.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;")} ${at}`; // Plotly reads markup
};
const sum = (numbers) => numbers.reduce((total, v) => total + v, 0);

// How the tokens are coloured: all bands, ranges of bands, the range that brings most, or one band.
function modes() {
  const { ranges, wavelengths } = entry();
  const over = (first, last) => ({ value: (row) => sum(row.slice(first, last + 1)) });
  return [
    { name: "attention", says: "", ...over(0, wavelengths.length) },
    { name: "attention, the first token aside", says: "Many heads rest on the first token; it is left out here.", aside: true, ...over(0, wavelengths.length) },
    { name: "the range that brings most", says: "Each token has the colour of the range of bands that brings it most attention.", dominant: true, ...over(0, wavelengths.length) },
    ...ranges.map((range) => ({ name: `${range.name} bands: ${range.says}`, says: "Orange: these bands move attention to the token; blue: away from it.", ...over(...range.bands) })),
    ...wavelengths.map((w, b) => ({ name: `band ${b}: ${w} tokens a turn`, says: "Orange: this band moves attention to the token; blue: away from it.", ...over(b, b) })),
  ];
}

function drawText() {
  const { text, first, last } = entry(), tokens = data.texts[text];
  if (drawnText === text) return;
  drawnText = text;
  byId("tokens").replaceChildren(...tokens.flatMap((token, at) => {
    const can = at >= first && at <= last;
    const element = document.createElement(can ? "button" : "span");
    if (can) { element.type = "button"; element.tabIndex = -1; }
    element.dataset.at = at;
    element.textContent = ropelens.shown(token);
    return token.includes("\n") ? [element, document.createElement("br")] : [element];
  }));
}
const tokenAt = (at) => byId("tokens").querySelector(`[data-at="${at}"]`);

async function read() {
  const { parts, first } = entry();
  const part = parts.find((one) => query >= one.first && query <= one.last);
  const row = ropelens.rows(await ropelens.load(part.file));
  const start = sum(range(query - part.first).map((i) => part.first + i + 1));
  return range(query + 1).map((key) => row(start + key));
}

const dominant = (row) => {
  const brought = entry().ranges.map(({ bands: [first, last] }) => sum(row.slice(first, last + 1)));
  return brought.indexOf(Math.max(...brought));
};

function shade() {
  const mode = modes()[byId("mode").selectedIndex], tokens = data.texts[entry().text];
  const shown = values.map(mode.value);
  if (mode.aside) shown[0] = 0;
  const largest = Math.max(...shown.map(Math.abs)) || 1;
  tokens.forEach((_, at) => {
    const element = tokenAt(at), value = shown[at];
    const known = at <= query;
    const alpha = known ? Math.sqrt(Math.abs(value) / largest) : 0; // weak tokens show beside one that takes nearly all
    let colour = known ? ropelens.colour(value, alpha) : "";
    if (known && mode.dominant) colour = ropelens.theme.colours[dominant(values[at])] + Math.round(255 * alpha).toString(16).padStart(2, "0");
    element.style.background = alpha < 0.03 ? "" : colour;
    element.title = known ? `${at}: ${+value.toPrecision(3)}` : `${at}`;
    element.classList.toggle("after", !known);
    element.classList.toggle("query", at === query);
    if (element.tagName === "BUTTON") {
      element.tabIndex = at === query ? 0 : -1;
      element.setAttribute("aria-pressed", at === query);
    }
  });
  byId("legend").replaceChildren(mode.says);
  if (mode.dominant)
    entry().ranges.forEach(({ name, says }, i) => {
      const mark = Object.assign(document.createElement("span"), { className: "mark" });
      mark.style.background = ropelens.theme.colours[i];
      byId("legend").append(" ", mark, ` ${name}: ${says}.`);
    });
}

function strongest(n) {
  const pattern = values.map(sum);
  return range(pattern.length).sort((a, b) => pattern[b] - pattern[a]).slice(0, n).map((at) => [at, pattern[at]]);
}

function describe() {
  const { layer, head, text, why } = entry(), tokens = data.texts[text];
  byId("reading").textContent = why ?? "";
  byId("to-head").href = `head.html#${layer}.${head}`;
  const quoted = (at) => Object.assign(document.createElement("q"), { textContent: ropelens.shown(tokens[at]) });
  byId("status").replaceChildren(`Layer ${layer}, head ${head}. The query `, quoted(query), ` at ${query} attends most to:`);
  byId("keys").replaceChildren(...strongest(5).filter(([, value]) => value >= 0.005).map(([at, value]) => {
    const li = document.createElement("li");
    li.append(quoted(at), ` at ${at}: ${Math.round(100 * value)}%`);
    return li;
  }));
}

function drawFigures() {
  const { wavelengths, text } = entry(), tokens = data.texts[text], n_bands = wavelengths.length;
  const keys = strongest(32).map(([at]) => at).sort((a, b) => a - b), y = range(keys.length);
  const labels = keys.map((at) => label(tokens[at], at)), z = keys.map((at) => values[at].slice(0, n_bands));
  const sizes = z.flat().map(Math.abs).sort((a, b) => a - b);
  const high = sizes[Math.floor(0.975 * (sizes.length - 1))] || sizes.at(-1) || 1; // one key may take nearly everything
  const axis = (layout) => ({ ...layout.yaxis, tickvals: y, ticktext: labels, title: undefined, tickfont: { size: 11 } });
  const height = 120 + 17 * Math.max(keys.length, 6);
  ropelens.draw("bands", data.figures.bands, ([map, bars], layout, narrow) => {
    Object.assign(map, { z, y, zmin: -high, zmax: high, customdata: keys.map(() => wavelengths), text: labels.map((l) => wavelengths.map(() => l)) });
    map.colorbar = { ...map.colorbar, orientation: "h", y: 1, yanchor: "bottom", len: 0.7, x: 0, xanchor: "left", tickangle: 0,
      tickvals: [-high, 0, high], tickformat: ".1g" };
    Object.assign(bars, { x: keys.map((at) => sum(values[at])), y, text: labels });
    Object.assign(layout, { height, yaxis: axis(layout) });
    layout.margin.t = 56;
    const every = Math.max(1, Math.ceil((n_bands - 1) / (narrow ? 4 : 7))), ticks = range(n_bands).filter((b) => b % every === 0);
    layout.xaxis = { ...layout.xaxis, tickvals: ticks, ticktext: ticks.map((b) => wavelengths[b]) };
    layout.xaxis2 = { ...layout.xaxis2, title: undefined };
  });
  ropelens.draw("parts", data.figures.parts, ([brings, takes, mark], layout) => {
    const part = (keep) => keys.map((at) => sum(values[at].filter(keep)));
    Object.assign(brings, { x: part((v) => v > 0), y, text: labels });
    Object.assign(takes, { x: part((v) => v < 0), y, text: labels });
    Object.assign(mark, { x: keys.map((at) => sum(values[at])), y, text: labels });
    Object.assign(layout, { height, yaxis: axis(layout) });
    layout.margin.t = 56;
    layout.xaxis = { ...layout.xaxis, title: undefined };
  });
}

async function show() {
  const { layer, head, first, last } = entry();
  query = Math.min(Math.max(query, first), last);
  drawText();
  const wanted = [entry(), query];
  const found = await read();
  if (wanted[0] !== entry() || wanted[1] !== query) return; // another was chosen meanwhile
  values = found;
  ropelens.goTo(layer, head, query);
  shade();
  describe();
  drawFigures();
}

function chooseEntry() {
  const kept = byId("mode").selectedIndex;
  ropelens.options(byId("mode"), modes().map(({ name }) => name), Math.max(0, Math.min(kept, modes().length - 1)));
  return show();
}

function fromHash() {
  const [layer, head, at] = ropelens.place();
  const index = data.entries.findIndex((one) => one.layer === layer && one.head === head && !(at < one.first || at > one.last));
  byId("entry").selectedIndex = index < 0 ? data.start.entry : index;
  query = index < 0 ? data.start.query : Number.isInteger(at) ? at : entry().last;
  return chooseEntry();
}

ropelens.options(byId("entry"), data.entries.map(named));
byId("entry").addEventListener("change", chooseEntry);
byId("mode").addEventListener("change", shade);
byId("tokens").addEventListener("click", ({ target }) => {
  if (target.tagName !== "BUTTON") return;
  query = Number(target.dataset.at);
  show();
});
byId("tokens").addEventListener("keydown", (event) => {
  const { first, last } = entry();
  const to = { ArrowRight: query + 1, ArrowDown: query + 1, ArrowLeft: query - 1, ArrowUp: query - 1, Home: first, End: last }[event.key];
  if (to === undefined || to < first || to > last) return;
  event.preventDefault();
  query = to;
  tokenAt(to).focus();
  show();
});
addEventListener("hashchange", fromHash);
ropelens.onTheme(() => { shade(); drawFigures(); });
fromHash().then(() => {
  tokenAt(query).scrollIntoView({ block: "nearest" });
  ropelens.ready();
});
