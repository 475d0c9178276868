// The charts of one job, drawn from data that Python sends: smoothed, logarithmic, with one pointer for all of them.
// Colours and the choice of points are Python's (job/view/curves.py). page.js precedes it in the same module.

const SIDE = 1000; // units of a drawing from side to side: it is stretched to its place, lines and dots are not
const SVG = "http://www.w3.org/2000/svg";
const SMOOTH_FROM = 8; // shorter lines are not smoothed
const GAP = "#e8930c"; // where values are nan or infinite, as in job/view/curves.py

// As Python's `facts.number`.
function figure(value) {
  const size = Math.abs(value);
  if (!Number.isFinite(value)) return String(value);
  if (size >= 1e7 || (size > 0 && size < 1e-4)) return value.toExponential(2);
  return size >= 999.95 || Number.isInteger(value) ? (Math.round(value) || 0).toLocaleString("en") : value.toPrecision(4);
}

// As Python's `facts.place`.
function axisText(axis, x) {
  if (axis !== "minute") return axis === "epoch" && !Number.isInteger(x) ? x.toFixed(2) : figure(x);
  if (x > 0 && 60 * x < 9.95) return `0:${(60 * x).toFixed(1).padStart(4, "0")}`;
  const seconds = Math.round(60 * x);
  const [hours, ...rest] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, seconds % 60];
  return `${hours ? `${hours}:` : ""}${rest.map((part, at) => (at || hours ? String(part).padStart(2, "0") : part)).join(":")}`;
}

function ticks(low, high, isLog) {
  if (isLog) {
    const [first, last] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
    const parts = last - first >= 2 ? [1] : [1, 2, 5];
    const found = [];
    for (let power = first - 1; power <= last; power += 1) found.push(...parts.map((part) => part * 10 ** power));
    const shown = found.filter((value) => value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9));
    const every = Math.ceil(shown.length / 5);
    const short = (value) => (value < 1 ? String(Number(value.toPrecision(1))) : figure(value));
    if (shown.length > 1) return shown.filter((_, index) => index % every === 0).map((value) => [value, short(value)]);
  }
  const rough = (high / 2 - low / 2) / 1.5;
  if (!(rough >= 1e-5 && rough <= 1e7) || Math.max(Math.abs(low), Math.abs(high)) > 1e7 * rough) {
    return [low, high].map((value) => [value, figure(value)]);
  }
  const power = 10 ** Math.floor(Math.log10(rough));
  const steps = [power, 2 * power, 5 * power].map((step) => [step, Math.ceil(low / step), Math.floor(high / step)]);
  const [step, first, last] = steps.reduce((best, one) =>
    Math.abs(one[2] - one[1] - 3) < Math.abs(best[2] - best[1] - 3) ? one : best);
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return Array.from({ length: last - first + 1 }, (_, index) => {
    const value = (first + index) * step;
    return [value, value.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals })];
  });
}

// An exponential moving average without its bias towards the first value, as TensorBoard has it.
function smoothed(points, weight) {
  let [sum, share] = [0, 0];
  return points.map(([x, y]) => {
    sum = sum * weight + (1 - weight) * y;
    share = share * weight + (1 - weight);
    return [x, sum / share];
  });
}

// The last of some points at a place or before it.
function before(points, x) {
  let [low, high] = [0, points.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] <= x) low = middle + 1;
    else high = middle;
  }
  return points[low - 1];
}

class ChartsView {
  constructor() {
    this.charts = [];
    this.choice = { smoothing: 0, log: false, large: "", axis: "" }; // the chart that is enlarged; the horizontal axis, where it is chosen
    this.at = null; // what the pointer is at: {axis, x}
    this.legend = element("div", { class: "kd-legend" });
    this.smoothing = element("input", {
      ...OWN_KEYS, type: "range", min: "0", max: "0.98", step: "0.02", value: "0", "aria-label": "Smoothing",
      oninput: () => this.choose({ smoothing: Number(this.smoothing.value) }),
    });
    this.slider = element("label", { class: "kd-slider" }, "Smoothing", this.smoothing);
    this.log = element("button", { type: "button", "aria-pressed": "false", onclick: () => this.choose({ log: !this.choice.log }) }, "Log scale");
    this.axis = element("select", { ...OWN_KEYS, "aria-label": "Horizontal axis", onchange: () => this.choose({ axis: this.axis.value }) });
    this.bar = element("div", { class: "kd-bar kd-charts-bar" }, this.legend, this.slider, this.axis, this.log);
    this.grid = element("div", { class: "kd-grid-of-charts" });
    this.alone = element("div", { class: "kd-alone" }); // metrics that have one value so far
    this.more = element("div", { class: "kd-more" });
    this.node = element("div", { class: "kd-curves" }, this.bar, this.grid, this.alone, this.more);
    this.grid.addEventListener("pointermove", (event) => this.point(event));
    this.grid.addEventListener("pointerdown", (event) => this.point(event));
    this.grid.addEventListener("click", (event) => {
      const name = event.target.closest?.(".kd-enlarge")?.closest(".kd-chart").dataset.kdName;
      if (name !== undefined) this.choose({ large: this.choice.large === name ? "" : name });
    });
    this.grid.addEventListener("pointerleave", () => this.pointAt(null));
  }

  take(text) {
    const { charts, remark } = text ? JSON.parse(text) : { charts: [], remark: "" };
    this.charts = charts;
    this.node.hidden = !charts.length;
    this.more.textContent = remark;
    this.draw();
  }

  get hasLines() {
    return this.charts.some((chart) => chart.series.some((one) => one.points.length > 1));
  }

  choose(choice) {
    this.choice = { ...this.choice, ...choice };
    this.log.setAttribute("aria-pressed", String(this.choice.log));
    this.draw();
  }

  draw() {
    this.series = this.charts.map((chart) => chart.series.map((one) => this.placed(one)));
    const lines = this.series.map((some) => {
      const axes = new Set(some.filter((one) => one.points.length > 1).map((one) => one.axis));
      return some.filter((one) => one.points.length && axes.has(one.axis)); // a single point stands on the axis of a line
    });
    const all = lines.flat();
    this.offer([...new Set(all.flatMap((one) => [one.own, ...Object.keys(one.places ?? {})]))]);
    this.slider.hidden = !all.some((one) => one.points.length >= SMOOTH_FROM);
    this.log.hidden = !all.some((one) => one.points.every(([, y]) => y > 0));
    const labels = new Map(all.map((one) => [one.label, one]));
    const fresh = this.legend.cloneNode(false);
    fresh.append(...[...labels.values()].map((one) => this.entry(one, one.label)));
    morph(this.legend, fresh);
    this.bar.hidden = !all.length;
    this.ranges = new Map();
    for (const { axis, points, gaps } of all) {
      const [left, right] = this.ranges.get(axis) ?? [Infinity, -Infinity];
      // The first epoch begins at 0, where its batches are drawn.
      const first = axis === "epoch" ? Math.floor(points[0][0]) : points[0][0];
      this.ranges.set(axis, [Math.min(left, first), Math.max(right, points[points.length - 1][0], ...(gaps ?? []).map(([, end]) => end))]);
    }
    this.grid.classList.toggle("kd-halves", [2, 4].includes(lines.filter((some) => some.length).length));
    for (const place of [this.grid, this.alone]) {
      const fresh = place.cloneNode(false);
      this.charts.forEach((chart, index) => (lines[index].length > 0) === (place === this.grid) && fresh.append(this.figure(chart, lines[index])));
      morph(place, fresh);
    }
  }

  // A line on the axis that is chosen, if its places there are known.
  placed(one) {
    const there = one.places?.[this.choice.axis];
    if (!there || one.axis === this.choice.axis) return { ...one, own: one.axis };
    return { ...one, own: one.axis, axis: this.choice.axis, points: there.points.map((x, index) => [x, one.points[index][1]]), gaps: there.gaps };
  }

  offer(axes) {
    this.axis.hidden = axes.length < 2;
    const fresh = this.axis.cloneNode(false);
    fresh.append(...axes.map((axis) => element("option", { value: axis }, `by ${axis}`)));
    morph(this.axis, fresh);
    this.axis.value = axes.includes(this.choice.axis) ? this.choice.axis : (axes[0] ?? "");
  }

  entry(one, label, value) {
    const made = element("span", { class: "kd-entry", title: one.label },
      element("span", { class: "kd-dot", "aria-hidden": "true", style: `background:${one.colour}${one.faint ? "80" : ""}` }));
    if (label) made.append(element("span", { class: "kd-label" }, label));
    if (value !== undefined) made.append(element("b", {}, value));
    return made;
  }

  figure(chart, lines) {
    const at = lines.length && lines[0].axis === this.at?.axis ? this.at : null;
    const shown = lines.map((one) => ({ ...one, ...this.drawn(one) }));
    const values = chart.series.filter((one) => !one.faint || at || chart.series.length === 1).map((one) => {
      const line = shown.find((other) => other.label === one.label);
      const isAt = at && line?.axis === at.axis;
      const found = isAt ? before(line.line, at.x) : null;
      return this.entry(one, line ? "" : one.label, isAt ? (found ? figure(found[1]) : "–") : one.last);
    });
    const said = chart.series.filter((one) => !one.faint || chart.series.length === 1).map((one) => `${one.last} ${one.label}`).join(", ");
    const isLarge = this.choice.large === chart.name;
    const head = element("div", { class: "kd-chart-head" },
      element("span", { class: "kd-chart-name", title: chart.name }, chart.name), element("span", { class: "kd-values" }, ...values));
    if (lines.length) {
      const word = `${isLarge ? "Make smaller" : "Enlarge"}: ${chart.name}`;
      head.append(element("button", { type: "button", class: "kd-enlarge", "aria-label": word, title: word, "aria-pressed": String(isLarge) }, isLarge ? "⤡" : "⤢"));
    }
    const made = element("div", { class: `kd-chart${isLarge ? " kd-large" : ""}`, "data-kd-name": chart.name }, head);
    if (lines.length) made.append(this.plot(shown, `${chart.name}: ${said}`, at, chart.zero));
    return made;
  }

  // The points of a line as they are drawn, and where they are smoothed also as they are.
  drawn(one) {
    const isSmooth = this.choice.smoothing > 0 && one.points.length >= SMOOTH_FROM;
    return { line: isSmooth ? smoothed(one.points, this.choice.smoothing) : one.points, raw: isSmooth ? one.points : null };
  }

  plot(lines, label, at, isFromZero) {
    const isLog = this.choice.log && lines.every((one) => one.points.every(([, y]) => y > 0) && (one.band ?? []).every(([low]) => low > 0));
    const axes = [...new Set(lines.map((one) => one.axis))];
    const ys = lines.flatMap((one) => [...one.points.map(([, y]) => y), ...(one.band ?? []).flat()]);
    // Charts of one axis show the same stretch of it, so that the pointer stands at one place in all of them.
    // Lines of different rhythm have an axis each; the pointer is for the first.
    const ranges = axes.map((axis) => this.ranges.get(axis));
    const [left, right] = ranges[0];
    let [low, high] = [Math.min(...ys, ...(isFromZero && !isLog ? [0] : [])), Math.max(...ys)];
    if (!(high / 2 - low / 2 > 0)) {
      const margin = Math.abs(low) / 2 || 1;
      [low, high] = [low - margin, high + margin];
    }
    const marks = ticks(low, high, isLog);
    const acrossOf = (axis) => {
      const [first, last] = this.ranges.get(axis);
      return (x) => (last > first ? ((x - first) / (last - first)) * SIDE : SIDE / 2);
    };
    const across = acrossOf(axes[0]);
    const share = isLog ? (y) => Math.log(y / low) / Math.log(high / low) : (y) => (y / 2 - low / 2) / (high / 2 - low / 2);
    const down = (y) => SIDE * (1 - share(y));
    const placeOf = (axis) => ([x, y]) => `${acrossOf(axis)(x).toFixed(1)} ${down(y).toFixed(1)}`;

    const svg = document.createElementNS(SVG, "svg");
    const add = (attributes) => {
      const made = document.createElementNS(SVG, "path");
      const plain = { fill: "none", "vector-effect": "non-scaling-stroke", "stroke-linejoin": "round", "stroke-linecap": "round" };
      for (const [name, value] of Object.entries({ ...plain, ...attributes })) made.setAttribute(name, value);
      svg.append(made);
    };
    for (const [name, value] of Object.entries({ role: "img", "aria-label": label, viewBox: `0 0 ${SIDE} ${SIDE}`, preserveAspectRatio: "none" })) svg.setAttribute(name, value);
    for (const [value] of marks) add({ d: `M0 ${down(value).toFixed(1)}H${SIDE}`, stroke: "currentColor", "stroke-opacity": "0.16" });
    const gaps = new Set(lines.flatMap((one) => (one.gaps ?? []).map((gap) => gap.map((x) => acrossOf(one.axis)(x).toFixed(1)).join(" "))));
    for (const [start, end] of [...gaps].map((gap) => gap.split(" "))) {
      add({ d: `M${start} 0H${end}V${SIDE}H${start}Z`, fill: GAP, "fill-opacity": "0.18", class: "kd-gap" });
    }
    for (const one of lines) {
      const place = placeOf(one.axis);
      if (one.band) {
        const edge = (side) => one.points.map(([x], index) => place([x, one.band[index][side]]));
        add({ d: `M${[...edge(0), ...edge(1).reverse()].join("L")}Z`, fill: one.colour, "fill-opacity": "0.2" });
      }
      if (one.raw) add({ d: `M${one.raw.map(place).join("L")}`, stroke: one.colour, "stroke-opacity": "0.25" });
      add({
        d: `M${one.line.map(place).join("L")}`, stroke: one.colour, "stroke-width": one.faint ? "1.25" : "1.75",
        ...(one.dashed ? { "stroke-dasharray": "5 5" } : {}), ...(one.faint ? { "stroke-opacity": one.raw ? "0.7" : "0.5" } : {}),
      });
      if (!one.faint) add({ d: `M${place(one.line[one.line.length - 1])}h0`, stroke: one.colour, "stroke-width": "5.5" });
    }
    const axis = axes[0];
    const text = (attributes, words) => element("span", attributes, words);
    const numbers = marks.map(([value, words]) => text({ class: "kd-y", style: `top:${(down(value) / SIDE) * 100}%` }, words));
    const x = at && Math.min(right, Math.max(left, at.x));
    const isAt = at !== null && axis === at.axis;
    if (isAt) {
      add({ d: `M${across(x).toFixed(1)} 0V${SIDE}`, stroke: "currentColor", "stroke-opacity": "0.45" });
      for (const one of lines.filter((line) => line.axis === axis)) {
        const found = before(one.line, at.x);
        if (found) add({ d: `M${placeOf(axis)(found)}h0`, stroke: one.colour, "stroke-width": "7" });
      }
      numbers.push(text({ class: "kd-x kd-here", style: `left:${(across(x) / SIDE) * 100}%` }, `${axis} ${axisText(axis, x)}`));
    } else {
      numbers.push(text({ class: "kd-x" }, axes.map((one, index) => `${one} ${axisText(one, ranges[index][0])}`).join(" · ")));
      numbers.push(text({ class: "kd-x kd-last" }, axes.map((one, index) => axisText(one, ranges[index][1])).join(" · ")));
    }
    const widest = Math.max(...marks.map(([, words]) => words.length));
    const inner = element("div", {
      class: "kd-plot", style: `left:${6 + Math.ceil(widest * 5.9)}px`, "data-left": left, "data-right": right, "data-axis": axis,
    }, svg, ...numbers);
    return element("div", { class: "kd-frame" }, inner);
  }

  // Point at the place under the pointer in all charts that have the same axis.
  point(event) {
    const plot = event.target.closest?.(".kd-chart")?.querySelector(".kd-plot");
    if (!plot?.dataset.axis) return this.pointAt(null);
    const frame = plot.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - frame.left) / frame.width));
    const [left, right] = [Number(plot.dataset.left), Number(plot.dataset.right)];
    return this.pointAt({ axis: plot.dataset.axis, x: this.nearest(plot.dataset.axis, left + share * (right - left)) });
  }

  // The nearest place of a point, so that values are those that were reported there.
  nearest(axis, x) {
    let best = null;
    for (const one of this.series.flat()) {
      if (one.axis !== axis) continue;
      for (const [place] of one.points) if (best === null || Math.abs(place - x) < Math.abs(best - x)) best = place;
    }
    return best ?? x;
  }

  pointAt(at) {
    if (at?.axis === this.at?.axis && at?.x === this.at?.x) return;
    this.at = at;
    this.draw();
  }
}
