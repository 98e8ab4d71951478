"use strict";
// What all pages share: data that scripts bring (files cannot be fetched), and figures in the page's colours.
const byId = (id) => document.getElementById(id);
const range = (n) => Array.from({ length: n }, (_, i) => i);

const ropelens = (() => {
  const store = {}, waiting = {}, figures = {}, redraw = [];
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const config = { responsive: true, displaylogo: false, displayModeBar: false };

  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer;

  const self = {
    put(name, value) {
      store[name] = value;
      waiting[name]?.resolve(value);
    },
    data: (name) => store[name],
    get theme() { return store.theme; },

    // A page opened from a file may load scripts, and nothing else.
    load(name) {
      if (store[name]) return Promise.resolve(store[name]);
      if (!waiting[name]) {
        const script = document.createElement("script");
        script.src = `data/${name}.js`;
        waiting[name] = {};
        waiting[name].promise = new Promise((resolve, reject) => Object.assign(waiting[name], { resolve, reject }));
        script.onerror = () => waiting[name].reject(new Error(`data/${name}.js is missing`));
        document.head.append(script);
      }
      return waiting[name].promise;
    },

    floats: ({ floats }) => new Float32Array(bytes(floats)),

    // Rows of whole steps of one byte, each row with the worth of its step; some rows have a second byte.
    rows({ scale, steps, fine, more }) {
      const worth = new Float32Array(bytes(scale)), all = new Int8Array(bytes(steps)), second = new Int8Array(bytes(more));
      const width = all.length / worth.length, place = new Map(Array.from(new Int32Array(bytes(fine)), (row, i) => [row, i]));
      return (row) => {
        const at = place.get(row);
        return range(width).map((i) => (all[row * width + i] + (at === undefined ? 0 : second[at * width + i] / 126)) * worth[row]);
      };
    },

    inks: () => (dark.matches ? ["#e6edf3", "#6b7682"] : ["#24292f", "#8c959f"]),
    narrow: (id) => byId(id).clientWidth < 600,

    // Figures come as Python made them; the page adds its own colours and takes titles away.
    draw(id, figure, change = () => {}) {
      const [ink, line] = self.inks(), narrow = self.narrow(id);
      const layout = { ...figure.layout, title: undefined, autosize: true, width: undefined, updatemenus: [] };
      layout.font = { ...layout.font, color: ink };
      layout.margin = { l: 48, r: 8, t: layout.legend || layout.annotations ? 40 : 12, b: 48 };
      layout.hoverlabel = { bgcolor: dark.matches ? "#2b323a" : "#ffffff", font: { color: ink }, bordercolor: line };
      if (layout.polar) layout.polar = { ...layout.polar, bgcolor: "rgba(0,0,0,0)" };
      if (narrow && layout.annotations)
        layout.annotations = layout.annotations.map((a) => ({ ...a, font: { ...a.font, size: 11 } }));
      for (const axis of Object.keys(layout).filter((key) => /^[xy]axis/.test(key)))
        layout[axis] = { ...layout[axis], linecolor: line, tickcolor: line, fixedrange: true };
      for (const axis of Object.keys(layout).filter((key) => /^yaxis/.test(key))) {
        layout[axis].automargin = true;
        if (layout[axis].title) layout[axis].title = { ...layout[axis].title, standoff: 8 };
      }
      for (const axis of Object.keys(layout).filter((key) => narrow && /^xaxis/.test(key) && layout[key].type === "category"))
        Object.assign(layout[axis], { tickangle: 0, tickfont: { size: 9 } });
      if (narrow) {
        if (layout.legend || figure.data.length > 1) Object.assign(layout.margin, { t: 40 });
        layout.legend = { ...layout.legend, title: undefined, orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", font: { size: 11 } };
        self.stack(layout);
      }
      const traces = figure.data.map((trace) => {
        const own = { ...trace };
        if (Array.isArray(own.colorscale) && own.zmin < 0)
          own.colorscale = store.theme.diverging[dark.matches ? "dark" : "light"];
        for (const part of [own, own.marker ?? {}])
          if (part.colorbar) part.colorbar = { ...part.colorbar, title: undefined };
        return own;
      });
      change(traces, layout, narrow);
      Plotly.react(id, traces, layout, config);
      self.madeFrom(id, figure.layout.meta?.ropelens);
    },

    // Panels that stand side by side stand one below the other where there is no room.
    stack(layout) {
      const [xs, ys] = ["x", "y"].map((letter) => Object.keys(layout).filter((key) => RegExp(`^${letter}axis\\d*$`).test(key)));
      const whole = ys.every((key) => !layout[key].domain || layout[key].domain[1] - layout[key].domain[0] > 0.99);
      const n = xs.length;
      if (n < 2 || n !== ys.length || !whole) return;
      const height = layout.height ?? 400, titled = (layout.annotations ?? []).length === n;
      xs.forEach((key, i) => {
        const top = 1 - i / n - (titled ? 0.06 / n : 0), bottom = 1 - (i + 1) / n + (i === n - 1 ? 0 : 0.3 / n);
        layout[key] = { ...layout[key], domain: [0, 1], anchor: ys[i].replace("axis", "") };
        layout[ys[i]] = { ...layout[ys[i]], domain: [bottom, top], anchor: key.replace("axis", ""), showticklabels: true, matches: undefined };
        if (titled) layout.annotations[i] = { ...layout.annotations[i], x: 0.5, y: top, yanchor: "bottom" };
      });
      layout.height = height * (1 + 0.6 * (n - 1));
    },

    // Under each figure, on request: what it was made from.
    madeFrom(id, meta) {
      const figure = byId(id).closest("figure");
      if (!meta || !figure || figure.querySelector(".made")) return;
      const details = document.createElement("details"), summary = document.createElement("summary"), pre = document.createElement("pre");
      details.className = "made";
      summary.textContent = "Made from";
      pre.tabIndex = 0;
      pre.textContent = JSON.stringify(meta, null, 1);
      details.append(summary, pre);
      figure.append(details);
    },

    options(select, names, chosen = 0) {
      select.replaceChildren(...names.map((name, i) => new Option(name, i, false, i === chosen)));
    },

    // "#10.1.57" is layer 10, head 1, query 57.
    place: () => location.hash.slice(1).split(".").map(Number),
    goTo(...numbers) { history.replaceState(null, "", `#${numbers.join(".")}`); },

    colour(value, alpha) {
      return (value >= 0 ? store.theme.above : store.theme.below) + Math.round(255 * alpha).toString(16).padStart(2, "0");
    },
    shown: (token) => token.replaceAll("\n", "⏎"),
    tokens(value) {
      if (Number.isNaN(value)) return "–";
      const [size, suffix] = value >= 999.5e3 ? [1e6, "M"] : value >= 999.5 ? [1e3, "k"] : [1, ""];
      return +(value / size).toPrecision(2) + suffix;
    },
    number: (value) => (value === null || Number.isNaN(value) ? "–" : String(+value.toPrecision(3))),

    // The ends of a colour scale: the 99th percentile, symmetric about 0 if anything is negative.
    ends(values) {
      const known = Array.from(values).filter((v) => !Number.isNaN(v));
      const sizes = known.map(Math.abs).sort((a, b) => a - b), at = 0.99 * (sizes.length - 1), low = Math.floor(at);
      const quantile = sizes.length ? sizes[low] + (at - low) * ((sizes[low + 1] ?? sizes[low]) - sizes[low]) : 0;
      const end = quantile || sizes.at(-1) || 1;
      return [known.some((v) => v < 0) ? -end : 0, end];
    },

    onTheme(change) { redraw.push(change); },
    ready() { document.body.dataset.ready = "yes"; },
  };
  dark.addEventListener("change", () => redraw.forEach((change) => change()));
  return self;
})();

// Figures that are shown as they are.
document.addEventListener("DOMContentLoaded", () => {
  const name = location.pathname.split("/").pop().replace(".html", "") || "index";
  const figures = ropelens.data(`${name}-figures`) ?? {};
  const all = () => Object.entries(figures).forEach(([id, figure]) => ropelens.draw(id, figure));
  all();
  ropelens.onTheme(all);
  if (!document.body.dataset.waits) ropelens.ready();
});
