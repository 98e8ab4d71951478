"use strict";
const data = ropelens.data("lesions");
const choices = ["task", "layers", "bands", "std", "seed"];
const text = (id, value) => { byId(id).textContent = value; };

// Each choice offers what the ones before it leave, and keeps its value where it can.
function refill(from) {
  let left = data.runs;
  choices.forEach((name, i) => {
    const select = byId(name);
    if (i > from) {
      const before = select.value;
      const values = [...new Set(left.map((run) => String(run[name])))];
      select.replaceChildren(...values.map((value) => new Option(value)));
      if (values.includes(before)) select.value = before;
    }
    left = left.filter((run) => String(run[name]) === select.value);
  });
  return left[0];
}

function fill(id, tokens, losses, spans) {
  const marked = new Set(spans.flatMap(([start, end]) => Array.from({ length: end - start }, (_, i) => start + i)));
  byId(id).replaceChildren(...tokens.map((token, i) => {
    const span = document.createElement("span");
    span.textContent = token;
    span.title = `${i}: ${losses[i]} nats`;
    const alpha = Math.min(losses[i] / 10, 1);
    if (alpha >= 0.05) span.style.background = ropelens.theme.above + Math.round(200 * alpha).toString(16).padStart(2, "0");
    if (marked.has(i)) span.className = "differs";
    return span;
  }));
}

const number = (value) => (value === null || value === undefined ? "–" : typeof value === "number" ? +value.toPrecision(3) : value);
const price = (loss) => (loss === null ? "no tokens" : `${number(loss)} nats a token`);

function turns(run, prefix) {
  const asked = run.introspection ?? {}, again = run.correction ?? {};
  text(prefix + "answer", asked.text ?? `not asked: ${asked.skipped ?? "left out"}`);
  text(prefix + "verdict", asked.verdict ? `read as: ${asked.verdict}` : "");
  text(prefix + "correction", again.text ?? `not asked: ${again.skipped ?? "left out"}`);
  text(prefix + "score", again.text === undefined ? "" : `${number(again.score)} of what is right, before ${number(again.before)}`);
}

function drawCurve(run) {
  const same = (row) => row.task === run.task && row.layers === run.layers && row.bands === run.bands;
  const rows = data.curves.filter(same), x = rows.map((row) => String(row.std));
  const others = data.runs.filter((other) => same(other));
  const [, line] = ropelens.inks();
  ropelens.draw("curve", {
    data: [
      { x, y: rows.map((row) => row.mean), name: "mean", mode: "lines+markers", line: { color: ropelens.theme.below },
        error_y: { type: "data", array: rows.map((r) => (r.high === null ? 0 : r.high - r.mean)),
          arrayminus: rows.map((r) => (r.low === null ? 0 : r.mean - r.low)), thickness: 1 } },
      { x: others.map((o) => String(o.std)), y: others.map((o) => o.loss), mode: "markers", name: "runs",
        marker: { color: "#8c8c8c", size: 5 } },
      { x: [String(run.std)], y: [run.loss], mode: "markers", name: "this run", marker: { color: ropelens.theme.above, size: 14 } },
    ],
    layout: {
      height: 340, showlegend: false, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      xaxis: { type: "category", title: { text: "noise" }, ticks: "outside", zeroline: false },
      yaxis: { rangemode: "tozero", ticks: "outside", zeroline: false },
      shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: data.limit, y1: data.limit, line: { dash: "dot", color: line } }],
    },
  });
}

let current;
function show(from) {
  const run = (current = refill(from)), healthy = data.healthy[run.control];
  text("prompt", data.prompts[run.task] ?? "");
  fill("hurt", run.tokens, run.losses, run.differs);
  fill("healthy", healthy.tokens, healthy.losses, run.control_differs);
  text("loss", price(run.loss));
  text("healthy-loss", price(healthy.loss));
  turns(run, "");
  turns(healthy, "healthy-");
  byId("readings").replaceChildren(...data.shown.filter(([name]) => run.readings[name] !== null).map(([name, label]) => {
    const row = document.createElement("div"), dt = document.createElement("dt"), dd = document.createElement("dd");
    dt.textContent = label;
    dd.textContent = String(number(run.readings[name])) || "nothing";
    row.append(dt, dd);
    return row;
  }));
  drawCurve(run);
}

choices.forEach((name, i) => byId(name).addEventListener("change", () => show(i)));
show(-1);
ropelens.onTheme(() => drawCurve(current));

