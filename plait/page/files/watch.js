// The live page: asks the server on this machine for what is new in the runs' files, and draws it. No library, and
// nothing from elsewhere. Reading order: asking, keeping, words, drawing, the parts of the page, the loop.
"use strict";

const TOKEN = new URLSearchParams(location.search).get("token") || "";
const MOST_POINTS = 1500; // of a run, however long it is: a tab's memory stays the same for days
const MOST_COMPARED = 6;
const COLOURS = ["--accent", "--orange", "--teal", "--purple", "--red", "--green"];
const ITEMS = [
  ["compute_s", "computing", "--blue"],
  ["waiting_s", "messages and other ranks", "--orange"],
  ["optimizer_s", "optimizer and the rest", "--teal"],
  ["data_s", "data", "--red"],
];

// ---------------------------------------------------------------- asking

class Gone extends Error {}

async function ask(path) {
  const options = { headers: { Authorization: `Bearer ${TOKEN}` }, cache: "no-store", signal: AbortSignal.timeout(30000) };
  const answer = await fetch(path, options);
  if (answer.status === 404) throw new Gone((await answer.json()).error);
  if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
  return answer.json();
}

// ---------------------------------------------------------------- keeping

// The curves of one run. A point is a bucket of one or more steps; where there are too many, each two become one.
class History {
  constructor(columns) {
    this.columns = columns;
    this.values = columns.filter((name) => columns.includes(name + "_min"));
    this.points = [];
  }

  add(rows) {
    for (const row of rows) this.points.push(Object.fromEntries(this.columns.map((name, at) => [name, row[at]])));
    while (this.points.length > MOST_POINTS) this.halve();
  }

  halve() {
    const merged = [];
    for (let at = 0; at < this.points.length; at += 2) {
      const next = this.points[at + 1];
      merged.push(next ? this.merge(this.points[at], next) : this.points[at]);
    }
    this.points = merged;
  }

  merge(one, two) {
    const [before, after] = [one.last - one.first + 1, two.last - two.first + 1];
    const both = { first: one.first, last: two.last, tokens: two.tokens };
    for (const name of this.values) {
      const [a, b] = [one[name], two[name]];
      const only = a === null ? two : one;
      const known = a !== null && b !== null;
      both[name] = known ? (a * before + b * after) / (before + after) : only[name];
      both[name + "_min"] = known ? Math.min(one[name + "_min"], two[name + "_min"]) : only[name + "_min"];
      both[name + "_max"] = known ? Math.max(one[name + "_max"], two[name + "_max"]) : only[name + "_max"];
    }
    return both;
  }
}

// What is known of one run: its last answer, its curves and its evaluations.
class Run {
  constructor(name) {
    Object.assign(this, { name, view: null, history: null, evaluations: [], lastStep: 0, version: null, gone: false });
    this.quiet = 0;
    this.dueAt = 0;
  }

  async refresh() {
    const path = `api/runs/${encodeURIComponent(this.name)}`;
    let view = await ask(`${path}?after=${this.lastStep}`);
    if (view.metrics.version !== this.version && view.metrics.after !== 0) view = await ask(`${path}?after=0`);
    const { version, after, columns, rows, evaluations } = view.metrics;
    if (after === 0) {
      this.history = new History(columns);
      this.evaluations = [];
    }
    this.version = version;
    this.history.add(rows);
    const known = new Set(this.evaluations.map((one) => one.step));
    this.evaluations.push(...evaluations.filter((one) => !known.has(one.step)));
    this.evaluations = this.evaluations.slice(-2000);
    this.quiet = rows.length && after !== 0 ? 0 : this.quiet + 1;
    const points = this.history.points;
    this.lastStep = points.length ? points[points.length - 1].last : 0;
    this.gone = false;
    view.metrics = null;
    this.view = view;
  }

  // Bytes of a token, as the newest evaluation has them; null where nothing was held out, or losses are of pairs.
  get bytesPerToken() {
    const known = this.evaluations.filter((one) => one.eval_nats_per_byte > 0);
    const newest = known[known.length - 1];
    return newest ? newest.eval_loss / newest.eval_nats_per_byte : null;
  }

  // What a loss is the mean of; runs that learn from pairs of answers have no tokens to count.
  get lossOf() {
    return this.evaluations.some((one) => "pair_accuracy" in one) ? "pair" : "token";
  }

  // A run at work is asked about once a step, at most every two seconds: the server takes next to nothing of its machine.
  waitMs() {
    const working = ["training", "starting"].includes(this.view?.state);
    const stepMs = 1000 * (this.view?.step_s ?? 1);
    return working ? Math.min(10000, Math.max(2000, stepMs, 1000 * this.quiet)) : 15000;
  }
}

// ---------------------------------------------------------------- words

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

function digits(value, count = 3) {
  if (value === 0) return "0";
  const size = Math.floor(Math.log10(Math.abs(value)));
  if (size >= 6 || size < -4) return value.toExponential(Math.max(0, count - 2)).replace("e+", "e");
  return value.toLocaleString("en", { maximumFractionDigits: Math.max(0, count - 1 - size) });
}

function count(value) {
  for (const [suffix, size] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["K", 1e3]])
    if (value >= size * 0.9995) return (value / size).toPrecision(3).replace(/\.0+$|(\.\d*?)0+$/, "$1") + suffix;
  return digits(value);
}

function bytes(value) {
  for (const [suffix, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (value >= size) return `${digits(value / size)} ${suffix}`;
  return `${digits(value)} B`;
}

function duration(seconds) {
  if (seconds < 0.1 && seconds > 0) return seconds < 1e-4 ? `${digits(seconds * 1e6)} µs` : `${digits(seconds * 1e3)} ms`;
  if (seconds < 59.95) return `${digits(seconds)} s`;
  const whole = Math.round(seconds);
  const parts = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = parts.findIndex(([, size]) => whole >= size);
  const [name, size] = parts[first];
  const [less, smaller] = parts[first + 1] ?? ["", 1];
  const rest = Math.floor((whole % size) / smaller);
  return rest && less ? `${Math.floor(whole / size)} ${name} ${rest} ${less}` : `${Math.floor(whole / size)} ${name}`;
}

const percent = (share, places = 0) => `${(100 * share).toFixed(places)}%`;
const compared = (ratio) => 
  Math.abs(ratio - 1) < 0.01 ? "as planned" : ratio > 1 ? `${digits(ratio)} × as long` : `${digits(1 / ratio)} × as fast`;
const times = (ratio) => `${ratio >= 10 ? ratio.toFixed(0) : ratio.toFixed(2)} ×`;

function ago(iso) {
  const seconds = (Date.now() - Date.parse(iso)) / 1000;
  return seconds < 10 ? "just now" : seconds < 86400 ? `${duration(Math.floor(seconds))} ago` : iso.slice(0, 10);
}

// ---------------------------------------------------------------- drawing

function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function svg(tag, attributes = {}, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text) element.textContent = text;
  return element;
}

function ticks(least, most, wanted) {
  const power = 10 ** Math.floor(Math.log10((most - least) / wanted));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => (most - least) / one <= wanted);
  const found = [];
  for (let at = Math.ceil(least / step - 1e-9); at * step <= most + step * 1e-9; at++) found.push(at * step);
  return found;
}

// A chart of curves over steps or tokens. Arrow keys, a pointer or a finger read its values.
class Chart {
  constructor(label, height, format) {
    Object.assign(this, { label, height, format, data: { series: [], dots: [] }, cursor: null });
    this.tip = make("div", { className: "tip", hidden: true });
    this.spoken = make("p", { className: "unseen" });
    this.spoken.setAttribute("aria-live", "polite");
    this.svg = svg("svg", { "aria-hidden": "true", height });
    this.element = make("div", { className: "chart", tabIndex: 0 }, this.svg, this.tip, this.spoken);
    this.element.setAttribute("role", "group");
    this.element.setAttribute("aria-roledescription", "chart");
    new ResizeObserver(() => this.draw()).observe(this.element);
    this.element.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.element.addEventListener("pointerdown", (event) => this.point(event.offsetX));
    this.element.addEventListener("pointerleave", () => this.read(null));
    this.element.addEventListener("blur", () => this.read(null));
    this.element.addEventListener("keydown", (event) => this.key(event));
  }

  // {series: [{name, colour, points: [{x, y, low, high, smooth}]}], dots: [{x, y}], line: {y, name}, xName}
  set(data) {
    this.data = data;
    this.draw();
  }

  draw() {
    const width = this.element.clientWidth;
    const { series, dots, line } = this.data;
    const all = series.flatMap((one) => one.points);
    this.svg.replaceChildren();
    if (!width || !all.length) return;
    const edge = { left: 52, right: 8, top: 8, bottom: 24 };
    const xs = [...all.map((one) => one.x), ...dots.map((one) => one.x)];
    const values = [...all.flatMap((one) => [one.smooth, one.low, one.high]), ...dots.map((one) => one.y)];
    if (line) values.push(line.y);
    let [low, high] = [least(values), largest(values)];
    if (this.data.fromZero) low = Math.min(low, 0);
    const slack = (high - low || Math.abs(high) || 1) * 0.05;
    [low, high] = [this.data.fromZero && low === 0 ? 0 : low - slack, high + slack];
    let [first, last] = [least(xs), largest(xs)];
    if (first === last) [first, last] = [first - 1, last + 1];
    const x = (value) => edge.left + ((value - first) / (last - first)) * (width - edge.left - edge.right);
    const y = (value) => edge.top + ((high - value) / (high - low)) * (this.height - edge.top - edge.bottom);
    Object.assign(this, { x, y });
    this.svg.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    for (const tick of ticks(low, high, this.height / 46)) {
      const at = Math.round(y(tick)) + 0.5;
      this.svg.append(svg("line", { class: "grid", x1: edge.left, x2: width - edge.right, y1: at, y2: at }));
      this.svg.append(svg("text", { x: edge.left - 8, y: at + 4, "text-anchor": "end" }, this.format(tick)));
    }
    for (const tick of ticks(first, last, Math.min(10, width / 80))) {
      const anchor = x(tick) > width - 30 ? "end" : "middle";
      const words = this.data.xName === "tokens" ? count(tick) : tick.toLocaleString("en");
      this.svg.append(svg("text", { x: x(tick), y: this.height - 6, "text-anchor": anchor }, words));
    }
    const mark = (tag, kind, attributes, colour) => {
      const element = svg(tag, { class: kind, ...attributes });
      if (colour) element.style.setProperty("--series", `var(${colour})`);
      this.svg.append(element);
    };
    if (line) mark("path", "forecast", { d: `M${edge.left},${y(line.y)}H${width - edge.right}` });
    for (const { points, colour } of series) {
      const path = (key) => points.map((one, at) => `${at ? "L" : "M"}${x(one.x).toFixed(1)},${y(one[key]).toFixed(1)}`);
      if (points.some((one) => one.high > one.low)) {
        const back = [...points].reverse().map((one) => `L${x(one.x).toFixed(1)},${y(one.low).toFixed(1)}`);
        mark("path", "band", { d: [...path("high"), ...back, "Z"].join("") }, colour);
      }
      if (points.some((one) => one.y !== one.smooth)) mark("path", "raw", { d: path("y").join("") }, colour);
      mark("path", "smooth", { d: path("smooth").join("") }, colour);
      if (points.length === 1) mark("circle", "smooth", { cx: x(points[0].x), cy: y(points[0].smooth), r: 2 }, colour);
    }
    for (const one of dots) mark("circle", "held", { cx: x(one.x), cy: y(one.y), r: 4 });
    const [begin, end] = [series[0].points[0], series[0].points[series[0].points.length - 1]];
    this.element.setAttribute(
      "aria-label",
      `${this.label}: ${this.format(begin.smooth)} at ${this.data.xName} ${digits(begin.x)}, ` +
        `${this.format(end.smooth)} at ${digits(end.x)}. Arrow keys read values.`,
    );
    this.showCursor(false);
  }

  point(offset) {
    if (!this.x || !this.data.series.length) return;
    const { points } = this.data.series[0];
    const distance = (at) => Math.abs(this.x(points[at].x) - offset);
    this.read(points.reduce((best, _, at) => (distance(at) < distance(best) ? at : best), 0));
  }

  key(event) {
    const most = (this.data.series[0]?.points.length ?? 0) - 1;
    const now = this.cursor ?? most + 1;
    const jump = Math.max(1, Math.round(most / 20));
    const moves = { ArrowLeft: now - 1, ArrowRight: now + 1, PageUp: now - jump, PageDown: now + jump, Home: 0, End: most };
    if (event.key === "Escape") this.read(null);
    if (!(event.key in moves) || most < 0) return;
    event.preventDefault();
    this.read(Math.max(0, Math.min(most, moves[event.key])), true);
  }

  read(at, aloud = false) {
    this.cursor = at;
    this.showCursor(aloud);
  }

  showCursor(aloud) {
    this.svg.querySelector(".cursor")?.remove();
    const point = this.cursor === null ? null : this.data.series[0]?.points[this.cursor];
    this.tip.hidden = !point;
    if (!point) return;
    const at = this.x(point.x);
    this.svg.append(svg("line", { class: "cursor", x1: at, x2: at, y1: 8, y2: this.height - 24 }));
    const where = `${this.data.xName} ${this.data.xName === "tokens" ? count(point.x) : point.x.toLocaleString("en")}`;
    const lines = this.data.series.map(({ name, colour, points }) => {
      const near = points.reduce((best, one) => (Math.abs(one.x - point.x) < Math.abs(best.x - point.x) ? one : best));
      const smoothed = near.smooth === near.y ? "" : ` (smoothed ${this.format(near.smooth, 4)})`;
      const key = make("i");
      key.style.setProperty("--series", `var(${colour})`);
      return [make("span", {}, key, `${name} ${this.format(near.y, 4)}${smoothed}`), `${name} ${this.format(near.y, 4)}`];
    });
    this.tip.replaceChildren(make("span", {}, where), ...lines.map(([element]) => element));
    const right = at + 12 + this.tip.offsetWidth > this.element.clientWidth;
    this.tip.style.left = `${right ? Math.max(0, at - 12 - this.tip.offsetWidth) : at + 12}px`;
    if (aloud) say(this.spoken, [where, ...lines.map(([, words]) => words)].join(", "));
  }
}

// Math.min(...) has a limit on how many arguments it takes.
const least = (values) => values.reduce((best, one) => (known(one) && one < best ? one : best), Infinity);
const largest = (values) => values.reduce((best, one) => (known(one) && one > best ? one : best), -Infinity);

// A curve's points, with the weighted mean of all before as `smooth` (exponential, as TensorBoard's).
function curve(points, value, axis, smoothing, factor = 1) {
  let [sum, weight] = [0, 0];
  const found = [];
  for (const one of points) {
    if (one[value] === null) continue;
    const y = one[value] * factor;
    sum = smoothing * sum + (1 - smoothing) * y;
    weight = smoothing * weight + (1 - smoothing);
    const [low, high] = [one[value + "_min"] * factor, one[value + "_max"] * factor];
    found.push({ x: axis === "tokens" ? one.tokens : one.last, y, smooth: sum / weight, low, high });
  }
  return found;
}

function legend(keys) {
  const items = keys.map(([kind, colour, words]) => {
    const mark = make("i", { className: kind });
    if (colour) mark.style[kind.includes("line") ? "color" : "background"] = `var(${colour})`;
    return make("li", {}, mark, words);
  });
  return make("ul", { className: "legend" }, ...items);
}

// Rows of stacked bars: [{name, value, parts: [[size, colour, words]], mark}], where `whole` fills a row.
function bars(rows, whole) {
  const lines = rows.map(({ name, value, parts, mark }) => {
    let at = 0;
    const track = make("div", { className: "track" });
    for (const [size, colour, words] of parts) {
      const piece = make("i", { title: words });
      Object.assign(piece.style, {
        left: `${(100 * at) / whole}%`, width: `${(100 * size) / whole}%`, background: `var(${colour})`,
      });
      track.append(piece);
      at += size;
    }
    if (known(mark)) {
      const line = make("b");
      line.style.left = `${Math.min(99.5, (100 * mark) / whole)}%`;
      track.append(line);
    }
    return make("div", { className: "row" }, make("span", {}, name), track, make("span", {}, value));
  });
  return make("div", { className: "bars named" }, ...lines);
}

function table(name, head, rows, kind = "numbers") {
  const cells = (tag, values) => values.map((one) => make(tag, tag === "th" ? { scope: "col" } : {}, one));
  const body = make("tbody", {}, ...rows.map((row) => make("tr", {}, ...cells("td", row))));
  const whole = make("table", { className: kind }, make("thead", {}, make("tr", {}, ...cells("th", head))), body);
  const room = make("div", { className: "scroll", tabIndex: 0 }, whole); // wider than a phone: keys scroll it
  room.setAttribute("role", "region");
  room.setAttribute("aria-label", name);
  return room;
}

// ---------------------------------------------------------------- the parts of the page

// A titled part that is there only while there is something to show in it; drawn again only where that changed.
class Part {
  constructor(title, id) {
    this.heading = make("h2", {}, title);
    this.body = make("div");
    this.element = make("section", { id, hidden: true }, this.heading, this.body);
    this.shown = "";
  }

  set(facts, draw) {
    this.element.hidden = facts === null;
    const now = JSON.stringify(facts);
    if (facts === null || now === this.shown) return;
    this.shown = now;
    this.body.replaceChildren(...draw(facts));
  }
}

class ChartPart {
  constructor(title, id, height, format, controls = []) {
    this.chart = new Chart(title, height, format);
    this.note = make("p");
    this.legend = make("div");
    const heading = make("h2", {}, title);
    this.element = make("section", { id, hidden: true }, heading, this.note, ...controls, this.chart.element, this.legend);
    this.keys = "";
  }

  set(data, keys, note) {
    const series = data.series.filter((one) => one.points.length);
    this.element.hidden = !series.length;
    if (!series.length) return;
    say(this.note, note);
    this.note.hidden = !note;
    this.chart.set({ ...data, series });
    if (JSON.stringify(keys) !== this.keys) this.legend.replaceChildren(legend(keys));
    this.keys = JSON.stringify(keys);
  }
}

const choices = { unit: "token", axis: "steps", smoothing: 0.8 };

function radios(name, title, options) {
  const set = make("fieldset", { id: `choose-${name}` }, make("legend", { className: "unseen" }, title));
  for (const [value, words] of options) {
    const input = make("input", { type: "radio", name, value, checked: choices[name] === value });
    input.addEventListener("change", () => { choices[name] = value; page.draw(); });
    set.append(make("label", {}, input, words));
  }
  return set;
}

function lossControls() {
  const slider = make("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: choices.smoothing });
  slider.addEventListener("input", () => { choices.smoothing = Number(slider.value); page.draw(); });
  return make(
    "div", { className: "controls" },
    radios("unit", "Unit of the loss", [["token", "per token"], ["byte", "per byte"]]),
    radios("axis", "Horizontal axis", [["steps", "by step"], ["tokens", "by tokens"]]),
    make("label", {}, "smoothing", slider),
  );
}

class Page {
  constructor() {
    this.runs = new Map();
    this.list = [];
    this.names = JSON.parse(document.body.dataset.runs);
    this.begun = this.names.length > 0;
    this.listDueAt = 0;
    this.failures = 0;
    this.build();
  }

  build() {
    const place = (name) => (this[name] = make("div"));
    this.name = make("h1");
    this.state = make("span", { className: "state" });
    this.about = make("p", { className: "about" });
    this.bar = make("i");
    this.reached = make("span");
    this.left = make("span");
    this.facts = make("dl", { className: "facts" });
    this.notes = place("notes");
    const progress = make("div", { className: "progress" }, this.bar);
    this.progress = make("div", {}, progress, make("p", { className: "progress-words" }, this.reached, this.left));
    const tokens = (value, n = 3) => (n === 3 ? count(value) : `${count(value)}/s`);
    this.limits = new Part("What limits it", "limits");
    this.compared = new Part("Side by side", "compared");
    this.loss = new ChartPart("Loss", "loss", 300, (value, n = 3) => digits(value, n), [lossControls()]);
    this.speed = new ChartPart("Tokens a second", "speed", 190, tokens);
    this.items = new Part("Where a step's time goes", "items");
    this.ranks = new Part("What each rank does", "ranks");
    this.memory = new Part("Memory", "memory");
    this.samples = new Part("What it writes", "samples");
    this.rate = new ChartPart("Learning rate", "rate", 140, (value, n = 3) => digits(value, n));
    this.norm = new ChartPart("Gradient norm", "norm", 140, (value, n = 3) => digits(value, n));
    this.shares = new Part("Shares of the batch", "shares");
    this.incidents = new Part("Failures", "incidents");
    this.command = new Part("Continue this run", "command");
    this.reasons = new Part("Why this plan", "reasons");
    const pair = (...parts) => make("div", { className: "pair" }, ...parts.map((one) => one.element));
    this.content = [
      make("div", { className: "title" }, this.name, this.state), this.about, this.progress, this.notes, this.facts,
      this.limits.element, this.compared.element, this.loss.element, pair(this.speed, this.items),
      pair(this.ranks, this.memory), this.samples.element,
      this.incidents.element, this.shares.element, pair(this.rate, this.norm), this.command.element, this.reasons.element,
    ];
    this.main = document.getElementById("run");
    this.link = document.getElementById("link");
    if (matchMedia("(max-width: 60rem)").matches) document.getElementById("picker").open = false;
  }

  // ---- choosing

  choose(names) {
    this.names = names.slice(-MOST_COMPARED);
    for (const name of this.runs.keys()) if (!this.names.includes(name)) this.runs.delete(name);
    this.drawList();
    this.draw();
    this.tick();
  }

  run(name) {
    if (!this.runs.has(name)) this.runs.set(name, new Run(name));
    return this.runs.get(name);
  }

  drawList() {
    const list = document.getElementById("runs");
    const focused = document.activeElement?.dataset?.key;
    const facts = this.list.map((one) => [one.name, one.state, one.step, one.steps, one.loss, ago(one.updated)]);
    const now = JSON.stringify([facts, this.names]);
    if (now === this.listShown) return;
    this.listShown = now;
    list.replaceChildren(...this.list.map((one) => this.row(one)));
    if (focused) list.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  }

  row(one) {
    const isShown = this.names.includes(one.name);
    const box = make("input", { type: "checkbox", checked: isShown, title: "Show beside the others" });
    box.setAttribute("aria-label", `Compare ${one.name}`);
    box.dataset.key = `box ${one.name}`;
    box.addEventListener("change", () => {
      const others = this.names.filter((name) => name !== one.name);
      this.choose(box.checked ? [...others, one.name] : others);
    });
    const part = one.steps ? `${percent(Math.min(1, one.step / one.steps))}` : "";
    const loss = known(one.loss) ? `loss ${one.loss.toPrecision(4)}` : "";
    const when = one.state === "training" ? "" : ago(one.updated);
    const words = make("small", {}, [one.state, part, loss, when].filter(Boolean).join(" · "));
    const button = make("button", { type: "button" }, make("b", {}, one.name), words);
    button.dataset.key = `run ${one.name}`;
    if (isShown) button.setAttribute("aria-current", "true");
    button.addEventListener("click", () => this.choose([one.name]));
    return make("li", { className: isShown ? "shown" : "" }, box, button);
  }

  // ---- drawing

  draw() {
    const shown = this.names.map((name) => this.run(name)).filter((run) => run.view);
    const [run] = shown;
    if (!run && this.list.some((one) => this.names.includes(one.name))) return; // its first answer is on its way
    if (!run) {
      const waiting = this.names.length
        ? `${this.names[0]} is not here yet: the page shows it as soon as its folder is made.`
        : this.list.length ? "Choose a run." : "There are no runs here yet. plait train RECIPE begins one.";
      this.main.replaceChildren(make("p", { className: "soft" }, waiting));
      document.title = "plait watch";
      return;
    }
    if (this.main.firstChild !== this.content[0]) this.main.replaceChildren(...this.content);
    this.drawHead(run);
    this.drawFacts(run);
    this.limits.set(run.view.bottleneck, ({ sentence, remedies }) => [
      make("p", { className: "limit" }, sentence),
      ...(remedies.length ? [
        make("p", {}, remedies.length > 1 ? "What would make it faster, each change by itself:" : "What would make it faster:"),
        make("ul", { className: "remedies" }, ...remedies.map((one) =>
          make("li", {}, make("b", {}, `${digits(one.gain, 2)} ×`), make("span", { className: "unseen" }, " as fast: "), make("span", {}, one.change)))),
      ] : []),
    ]);
    this.drawCurves(shown);
    this.drawCompared(shown);
    this.drawItems(run.view);
    this.drawRanks(run.view);
    this.drawMemory(run.view);
    this.drawSamples(run.view);
    this.drawShares(run.view);
    this.drawIncidents(run.view);
    const { state, command, plan } = run.view;
    this.command.set(command && ["stopped", "failed", "finished"].includes(state) ? command : null, () => [
      make("p", {}, make("code", {}, command)),
    ]);
    this.reasons.set(plan?.reasons.length ? [plan.reasons, plan.warnings] : null, ([reasons, warnings]) => [
      ...warnings.map((one) => make("p", { className: "note" }, `Warning: ${one}`)),
      make(
        "details", { className: "reasons" }, make("summary", {}, `${reasons.length} choices, each with its reason`),
        make("ul", {}, ...reasons.map((one) => make("li", {}, one))),
      ),
    ]);
  }

  drawHead(run) {
    const { plan, state, step, eta_s, problems } = run.view;
    say(this.name, run.name);
    this.state.className = `state ${state}`;
    say(this.state, run.gone ? "deleted" : state);
    const begins = "plait prepares the text and measures the machine; the first step follows.";
    const about = plan ? `${plan.model} · ${plan.devices} · ${plan.layout}, ${plan.workers}` : "";
    say(this.about, state === "starting" ? begins : about);
    this.progress.hidden = !plan;
    const share = plan ? Math.min(1, step / plan.steps) : 0;
    this.bar.style.width = percent(share, 2);
    if (plan) say(this.reached, `step ${step.toLocaleString("en")} of ${plan.steps.toLocaleString("en")} · ${percent(share)}`);
    const works = state === "training" && known(eta_s) && eta_s > 0;
    const end = new Date(Date.now() + 1000 * (eta_s ?? 0));
    const clock = end.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
    const day = end.toDateString() === new Date().toDateString() ? "" : ` on ${end.toLocaleDateString("en-CA")}`;
    say(this.left, works ? `${duration(Math.round(eta_s))} left, until ${clock}${day}` : "");
    const notes = [...problems];
    if (run.gone) notes.unshift("The folder of this run is gone; what was read of it before stays here.");
    if (JSON.stringify(notes) !== this.noted) this.notes.replaceChildren(...notes.map((one) => make("p", { className: "note" }, one)));
    this.noted = JSON.stringify(notes);
    document.title = plan ? `${percent(share)} ${run.name} · plait` : `${run.name} · plait`;
  }

  drawFacts(run) {
    const { plan, forecast, step_s, memory, trained_s, eta_s, state, receipt, ranks } = run.view;
    const points = run.history.points;
    const recent = (value) => {
      const found = points.slice(-50).map((one) => one[value]).filter((one) => one !== null);
      return found.length ? found.reduce((sum, one) => sum + one, 0) / found.length : null;
    };
    const perByte = choices.unit === "byte" && run.bytesPerToken;
    const factor = perByte ? 1 / run.bytesPerToken : 1;
    const [rate, mfu] = [recent("tokens_per_s"), recent("mfu")];
    const losses = curve(points, "loss", "steps", choices.smoothing, factor);
    const loss = losses[losses.length - 1];
    const held = run.evaluations[run.evaluations.length - 1];
    const facts = [];
    const add = (title, value, ...small) => facts.push([title, value, small.filter(Boolean)]);
    if (loss)
      add(perByte ? "loss per byte" : `loss per ${run.lossOf}`, loss.smooth.toPrecision(4), `last step ${loss.y.toPrecision(4)}`,
        held && `held out ${(perByte ? held.eval_nats_per_byte : held.eval_loss).toPrecision(4)} at step ${held.step}`);
    if (known(rate)) add("tokens a second", count(rate), forecast && `plan ${count(forecast.tokens_per_s)}`);
    if (known(step_s)) add("a step", duration(step_s), forecast && `plan ${duration(forecast.step_s)}: ${compared(step_s / forecast.step_s)}`);
    if (known(mfu)) add("MFU", percent(mfu), "of the arithmetic peak");
    const onGpu = plan?.device === "cuda";
    const used = onGpu ? memory.tensor_bytes : memory.process_bytes;
    if (used?.length && plan) {
      const whole = onGpu ? Math.max(...used) : used.slice(0, plan.workers_per_host).reduce((sum, one) => sum + one, 0);
      add("memory", bytes(whole), plan.memory_bytes && `${percent(whole / plan.memory_bytes, 1)} of ${bytes(plan.memory_bytes)}`);
    }
    if (trained_s) {
      const price = plan?.price_per_hour;
      const so_far = receipt?.cost_usd ?? (price ? (price * trained_s) / 3600 : null);
      const all = price && state === "training" && known(eta_s) ? (price * (trained_s + eta_s)) / 3600 : null;
      add("time trained", duration(trained_s), plan && `budget ${plan.budget}`,
        known(so_far) && `$${so_far.toFixed(2)}${all ? `, $${all.toFixed(2)} in all` : ""}`);
    }
    const now = JSON.stringify(facts);
    if (now === this.factsShown) return;
    this.factsShown = now;
    this.facts.replaceChildren(...facts.map(([title, value, small]) => {
      const [, number, unit] = /^([\d.,]+)(.*)$/.exec(value) ?? ["", value, ""];
      const lines = small.map((one) => make("small", {}, one));
      return make("div", {}, make("dt", {}, title), make("dd", {}, number, make("span", {}, unit), ...lines));
    }));
  }

  drawCurves(shown) {
    const { unit, axis, smoothing } = choices;
    const inBytes = shown.every((run) => run.bytesPerToken);
    document.getElementById("choose-unit").hidden = !inBytes;
    const perByte = unit === "byte" && inBytes;
    const xName = axis === "tokens" ? "tokens" : "step";
    const several = shown.length > 1;
    const series = (value, smooth, factor = () => 1) =>
      shown.map((run, at) => ({
        name: several ? run.name : "", colour: COLOURS[at],
        points: curve(run.history.points, value, axis, smooth, factor(run)),
      }));
    const tokensAt = (run, step) => run.history.points.find((one) => one.last >= step)?.tokens;
    const dots = shown.flatMap((run) =>
      run.evaluations.map((one) => ({
        x: axis === "tokens" ? tokensAt(run, one.step) : one.step,
        y: perByte ? one.eval_nats_per_byte : one.eval_loss,
      })).filter((one) => known(one.x) && known(one.y)));
    const names = several ? shown.map((run, at) => ["line", COLOURS[at], run.name]) : [];
    const curveKeys = several ? names : [["line", COLOURS[0], smoothing ? "training, smoothed" : "training"]];
    const nats = `nats per ${perByte ? "byte" : shown[0].lossOf}`;
    const measured = perByte ? ", by the bytes that a token of the held-out text has on average" : "";
    this.loss.set(
      { series: series("loss", smoothing, (run) => (perByte ? 1 / run.bytesPerToken : 1)), dots, xName },
      dots.length ? [...curveKeys, ["dot", "", "held-out text"]] : curveKeys, `In ${nats}${measured}.`);
    const forecast = several ? null : shown[0].view.forecast;
    const line = forecast && { y: forecast.tokens_per_s };
    const error = forecast && `, give or take ${percent(forecast.error)}`;
    const source = forecast && (forecast.is_timed ? "steps timed before the run" : "the plan's forecast");
    this.speed.set({ series: series("tokens_per_s", smoothing), dots: [], line, xName, fromZero: true },
      [...(several ? names : [["line", COLOURS[0], "measured"]]), ...(line ? [["line dashed", "--soft", `${source}${error}`]] : [])], "");
    this.rate.set({ series: series("lr", 0), dots: [], xName, fromZero: true }, names, "");
    this.norm.set({ series: series("grad_norm", smoothing), dots: [], xName, fromZero: true }, names, "");
  }

  drawCompared(shown) {
    const rows = shown.map((run, at) => {
      const [held, last] = [run.evaluations[run.evaluations.length - 1], run.history.points[run.history.points.length - 1]];
      const { plan, step, state, forecast, step_s } = run.view;
      return {
        colour: COLOURS[at], name: run.name, state, step: plan ? `${step} of ${plan.steps}` : `${step}`,
        loss: last && known(last.loss) ? last.loss.toPrecision(4) : "", held: held ? held.eval_loss.toPrecision(4) : "",
        byte: held && known(held.eval_nats_per_byte) ? held.eval_nats_per_byte.toPrecision(4) : "",
        rate: known(step_s) && plan ? count(plan.batch_tokens / step_s) : "",
        plan: forecast && known(step_s) ? times(step_s / forecast.step_s) : "",
        model: plan?.model ?? "", layout: plan?.layout ?? "",
      };
    });
    const head = ["run", "state", "step", "loss", "held out", "per byte", "tokens/s", "step to plan", "layout"];
    this.compared.set(rows.length > 1 ? rows : null, (all) => [
      table("The runs side by side", head, all.map((one) => {
        const key = make("i", { className: "key" });
        key.style.background = `var(${one.colour})`;
        return [make("span", {}, key, one.name), one.state, one.step, one.loss, one.held, one.byte, one.rate, one.plan, one.layout];
      })),
      make("p", { className: "soft" }, `Below the curves: ${all[0].name}.`),
    ]);
  }

  drawItems(view) {
    const { items, forecast, ranks } = view;
    const planned = forecast?.items ?? null;
    this.items.set(items || planned ? [items, planned] : null, () => {
      const total = (some) => ITEMS.reduce((sum, [key]) => sum + (some?.[key] ?? 0), 0);
      const whole = Math.max(total(items), total(planned)) || 1;
      const row = (name, some) => ({
        name, value: duration(total(some)),
        parts: ITEMS.map(([key, words, colour]) => [some[key], colour, `${words}: ${duration(some[key])}`]),
      });
      const rows = [...(items ? [row("measured", items)] : []), ...(planned ? [row("plan", planned)] : [])];
      const cell = (some, key) => (some ? duration(some[key]) : "");
      const cells = ITEMS.map(([key, words, colour]) => {
        const mark = make("i", { className: "key" });
        mark.style.background = `var(${colour})`;
        const share = items && total(items) ? percent(items[key] / total(items)) : "";
        return [make("span", {}, mark, words), cell(items, key), share, cell(planned, key)];
      });
      const note = ranks
        ? `On the rank that computes most, over the last ${ranks.steps} steps.`
        : items ? "Medians of the whole run." : "The ranks' own times are not known yet.";
      return [make("p", {}, note), bars(rows, whole), table("Seconds of a step by item", ["", "measured", "share", "plan"], cells)];
    });
  }

  drawRanks(view) {
    const { ranks, plan, step_s } = view;
    if (!ranks || ranks.compute_s.length < 2) return this.ranks.set(null);
    this.ranks.set([ranks, step_s], () => {
      const messages = Math.min(...ranks.wait_s);
      const number = ranks.compute_s.length;
      const all = ranks.compute_s.map((compute, rank) => ({
        rank, compute, inside: ranks.inside_s[rank], others: ranks.wait_s[rank] - messages, messages, data: ranks.data_s[rank],
      }));
      const whole = Math.max(step_s ?? 0, ...all.map((one) => one.compute + one.inside + one.others + messages + one.data));
      const shown = number <= 16 ? all : [...all].sort((a, b) => b.compute - a.compute).slice(0, 16);
      const kinds = [
        ["compute", "computes", "--blue"], ["inside", "waits within its replica", "--purple"],
        ["others", "waits for other ranks", "--orange"], ["messages", "messages", "--teal"], ["data", "waits for data", "--red"],
      ].filter(([key]) => all.some((one) => one[key] > 0.002 * whole));
      const host = (rank) => (new Set(plan?.hosts).size > 1 ? ` ${plan.hosts[rank]}` : "");
      const rows = shown.map((one) => ({
        name: `rank ${one.rank}${host(one.rank)}`, value: `computes ${percent(one.compute / whole)}`,
        parts: kinds.map(([key, words, colour]) => [one[key], colour, `rank ${one.rank} ${words}: ${duration(one[key])}`]),
      }));
      const last = all.reduce((best, one) => (one.others < best.others ? one : best));
      const waits = all.reduce((sum, one) => sum + one.others, 0) / (number - 1) / whole;
      const words = waits > 0.03
        ? `The others wait for rank ${last.rank}${host(last.rank)}: ${percent(waits)} of each step on average.`
        : "No rank waits long for another.";
      const more = number > shown.length ? ` Shown are the 16 of ${number} that compute longest.` : "";
      const keys = kinds.map(([, name, colour]) => ["", colour, name]);
      return [make("p", {}, words + more), bars(rows, whole), legend(keys)];
    });
  }

  drawMemory(view) {
    const { memory, plan, forecast } = view;
    const onGpu = plan?.device === "cuda";
    const used = onGpu ? memory.tensor_bytes : memory.process_bytes;
    this.memory.set(used?.length && plan ? [used, memory.tensor_bytes] : null, () => {
      const limit = plan.memory_bytes ? plan.memory_bytes / (onGpu ? 1 : plan.workers_per_host) : Math.max(...used);
      const planned = forecast && (onGpu ? forecast.tensor_bytes : forecast.bytes_per_device);
      const shown = used.map((size, rank) => ({ rank, size })).sort((a, b) => b.size - a.size).slice(0, 16).sort((a, b) => a.rank - b.rank);
      const rows = shown.map(({ rank, size }) => ({
        name: `rank ${rank}`, value: bytes(size), mark: planned,
        parts: onGpu ? [[size, "--blue", `tensors: ${bytes(size)}`]] : [
          [memory.tensor_bytes[rank], "--blue", `tensors: ${bytes(memory.tensor_bytes[rank])}`],
          [Math.max(0, size - memory.tensor_bytes[rank]), "--grey", `the rest of the process: ${bytes(size - memory.tensor_bytes[rank])}`],
        ],
      }));
      const keys = [["", "--blue", "tensors, at their peak"], ...(onGpu ? [] : [["", "--grey", "rest of the process"]])];
      const whose = onGpu ? "a GPU's" : "a worker's share of this machine's";
      const note = `A row is ${bytes(limit)}, ${whose} memory${planned ? `; the dashed line is the plan's forecast, ${bytes(planned)}` : ""}.`;
      return [make("p", {}, note), bars(rows, limit), legend(keys)];
    });
  }

  drawSamples(view) {
    const { samples } = view;
    this.samples.set(samples.length ? samples : null, () => {
      const part = (one) => make(
        "figure", { className: "sample" }, make("figcaption", {}, one.step ? `after step ${one.step.toLocaleString("en")}` : "before training"),
        make("p", {}, make("span", {}, one.prompt), one.text),
      );
      const [first, ...later] = samples;
      const newest = later.pop();
      const between = later.reverse().map(part);
      const all = [...(newest ? [part(newest)] : []), part(first)];
      const note = "Each sample begins with the same words, in grey, and is drawn with the same random numbers.";
      if (between.length) all.push(make("details", {}, make("summary", {}, `${between.length} between them`), ...between));
      return [make("p", {}, note), make("div", { className: "samples" }, ...all)];
    });
  }

  drawShares(view) {
    const { shares, plan } = view;
    const uneven = (list) => list?.length && new Set(list).size > 1;
    const begun = plan && (uneven(plan.sequences_per_replica) || uneven(plan.stage_layers));
    this.shares.set(shares.length || begun ? [shares, plan?.sequences_per_replica] : null, () => {
      const list = (numbers) => numbers.join(" : ");
      const staged = shares.some((one) => one.stage_layers.length) || uneven(plan?.stage_layers);
      const rows = [
        ...(plan ? [["1", list(plan.sequences_per_replica), list(plan.stage_layers), "as planned"]] : []),
        ...shares.map((one) => [String(one.step), list(one.shares), list(one.stage_layers), one.reason]),
      ].map(([step, sequences, layers, why]) => (staged ? [step, sequences, layers, why] : [step, sequences, why]));
      return [table("Shares of each replica", ["from step", "sequences of each replica", ...(staged ? ["layers of each stage"] : []), "why"], rows, "")];
    });
  }

  drawIncidents(view) {
    const then = { "started again": "went on from step", ended: "ended", "gave up": "gave up" };
    this.incidents.set(view.incidents.length ? view.incidents : null, (incidents) => {
      const items = [...incidents].reverse().slice(0, 100).map((one) => {
        const went = one.decision === "started again" ? `${then[one.decision]} ${one.resumed_from}` : then[one.decision];
        const lost = one.steps_lost ? `, ${one.steps_lost} steps done again` : "";
        const when = `${one.at.slice(0, 19).replace("T", " ")} UTC, after step ${one.step}: ${went}${lost}`;
        return make("li", {}, one.sentence, make("small", {}, when));
      });
      return [make("ol", { className: "events" }, ...items)];
    });
  }

  // ---- the loop

  async tick() {
    clearTimeout(this.timer);
    if (this.busy) return;
    this.busy = true;
    try {
      await this.refresh();
      this.failures = 0;
      say(this.link, "");
    } catch (error) {
      this.failures += 1; // of asking: what is drawn stays
      const ended = "No answer: the page's server has ended. plait watch starts it again.";
      if (this.failures > 1) say(this.link, error instanceof TypeError ? ended : error.message);
    }
    this.busy = false;
    // A page that nobody sees asks nothing.
    if (!document.hidden) this.timer = setTimeout(() => this.tick(), this.pauseMs());
    this.drawList();
    this.draw();
  }

  async refresh() {
    const now = performance.now();
    if (now >= this.listDueAt) {
      this.list = await ask("api/runs");
      const working = this.list.some((one) => ["training", "starting"].includes(one.state));
      this.listed = new Set(this.list.map((one) => one.name));
      const awaited = this.names.some((name) => !this.listed.has(name));
      this.listDueAt = now + (awaited ? 1500 : working ? 10000 : 15000);
      if (!this.begun && this.list.length) {
        this.names = [(this.list.find((one) => one.state === "training") ?? this.list[0]).name];
        this.begun = true;
      }
    }
    for (const run of this.names.map((name) => this.run(name)).filter((one) => now >= one.dueAt)) {
      if (!this.listed.has(run.name)) {
        run.gone = run.view !== null;
        run.dueAt = this.listDueAt;
        continue;
      }
      try {
        await run.refresh();
      } catch (error) {
        if (!(error instanceof Gone)) throw error;
        this.listDueAt = 0; // deleted since the list was made
      }
      run.dueAt = now + run.waitMs();
    }
  }

  pauseMs() {
    if (this.failures) return Math.min(30000, 1000 * 2 ** this.failures);
    const due = [this.listDueAt, ...this.names.map((name) => this.run(name).dueAt)];
    return Math.max(250, Math.min(...due) - performance.now());
  }
}

const page = new Page();
document.addEventListener("visibilitychange", () => { if (!document.hidden) page.tick(); });
page.tick();
