"use strict";
// Draws the timelines of a profile report, and sorts and folds its tables.
//
// In:  the JSON beside it (report/embedded.py). Out: one canvas a timeline, with zoom and hover.
//
//   map      ▁▁▁▁▁████▁▁▁▁      the whole span, and the part that shows
//   axis     0    2    4 ms
//   lanes    │conv ││norm │      bars: phases, layers, ops;  lines: power, cores, memory …
//
// Every text is set as text, never as markup. Nothing is fetched. What shows is in data-from, data-to and data-op of
// the view, where a test can read it.
(() => {
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const MAP = 14, AXIS = 20, GAP = 10, TITLE = 16, BOTTOM = 6;
  const DASHES = [[], [5, 3], [2, 3], [8, 3, 2, 3]]; // lines of one lane, in the order of their names
  const LEAST = 1e-5; // of the span: the most that one can zoom in

  // ---- numbers ---------------------------------------------------------------------------------------------

  const SCALES = {
    s: [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]],
    J: [["kJ", 1e3], ["J", 1], ["mJ", 1e-3], ["µJ", 1e-6]],
    W: [["kW", 1e3], ["W", 1], ["mW", 1e-3]],
    B: [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["B", 1]],
    Hz: [["GHz", 1e9], ["MHz", 1e6], ["kHz", 1e3], ["Hz", 1]],
    FLOP: [["TFLOP", 1e12], ["GFLOP", 1e9], ["MFLOP", 1e6], ["kFLOP", 1e3], ["FLOP", 1]],
  };

  function scaleOf(value, unit) {
    const sizes = SCALES[unit] || [[unit, 1]];
    return sizes.find(([, size]) => Math.abs(value) >= 0.9995 * size) || (value ? sizes[sizes.length - 1] : sizes.find(([, size]) => size === 1));
  }

  function digits(value) {
    const size = Math.abs(value);
    if (size >= 1e15 || (size > 0 && size < 1e-9)) return value.toExponential(2);
    return size >= 99.5 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
  }

  function quantity(value, unit) {
    if (unit === "1") return digits(100 * value) + " %";
    const [name, size] = scaleOf(value, unit);
    return digits(value / size) + (name ? " " + name : "");
  }

  function range(low, high, value, unit) {
    const [name, size] = scaleOf(value, unit);
    if (low === null) return "";
    return high === null ? `from ${digits(low / size)} ${name}` : `${digits(low / size)} to ${digits(high / size)} ${name}`;
  }

  // ---- small helpers ---------------------------------------------------------------------------------------

  function make(kind, style, text) {
    const element = document.createElement(kind);
    if (style) element.className = style;
    if (text !== undefined) element.textContent = text;
    return element;
  }

  let colours = {};
  function colour(name) {
    if (!(name in colours)) colours[name] = getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim() || "#888";
    return colours[name];
  }

  /** The last place whose value is not above x; -1 where none is. */
  function before(values, x) {
    let low = 0, high = values.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] <= x) low = middle + 1; else high = middle;
    }
    return low - 1;
  }

  function finite(values) { return values.filter((value) => value !== null); }
  function quantile(values, part) { return values.length ? [...values].sort((a, b) => a - b)[Math.floor(part * (values.length - 1))] : 0; }
  function most(values) { return values.reduce((a, b) => Math.max(a, b), -Infinity); }
  function least(values) { return values.reduce((a, b) => Math.min(a, b), Infinity); }

  /** As much of a text as there is room for. Of a path such as features.3.conv the end says most. */
  function fitted(context, text, width) {
    if (width < 8) return "";
    if (context.measureText(text).width <= width) return text;
    const parts = text.split(".");
    for (let n = 1; n < parts.length; n++) {
      const rest = parts.slice(n).join(".");
      if (context.measureText(rest).width <= width) return rest;
    }
    const each = context.measureText(text).width / text.length;
    const room = Math.floor(width / each) - 1;
    return room >= 3 ? text.slice(0, room) + "…" : "";
  }

  // ---- lanes -----------------------------------------------------------------------------------------------

  /** Bars in rows. A row: {begin, end, colour(i), label(i), mark(i)}; marked ones run again. */
  function barLane(title, rows, height) {
    return {
      title, height: rows.length * (height + 1),
      draw(context, view, top) {
        rows.forEach((row, place) => drawBars(context, view, row, top + place * (height + 1), height));
      },
      drawMap(context, view, tall) {
        drawBars(context, view, { ...rows[0], label: () => "", mark: () => false }, 0, tall);
      },
    };
  }

  /** Text that can be read on top of lines. */
  function overLines(context, text, x, y) {
    context.lineWidth = 3;
    context.strokeStyle = colour("card");
    context.strokeText(text, x, y);
    context.fillStyle = colour("soft");
    context.fillText(text, x, y);
  }

  function drawBars(context, view, row, top, height) {
    const n = row.begin.length;
    let last = -1;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    for (let i = Math.max(0, before(row.begin, view.from)); i < n && row.begin[i] <= view.to; i++) {
      const left = Math.max(view.x(row.begin[i]), -2), right = Math.min(view.x(row.end[i]), view.width + 2);
      const width = right - left;
      if (width < 0.7) { // several share a pixel: one is drawn
        const pixel = Math.floor(left);
        if (pixel === last) continue;
        last = pixel;
      }
      context.globalAlpha = row.alpha ? row.alpha(i) : 1;
      context.fillStyle = row.colour(i);
      context.fillRect(left, top, Math.max(width - (width > 3 ? 0.8 : 0), 0.7), height);
      context.globalAlpha = 1;
      if (row.mark && row.mark(i)) {
        context.fillStyle = colour("again");
        context.fillRect(left, top + height - 5, Math.max(width - (width > 3 ? 0.8 : 0), 0.7), 5);
      }
      if (row.current && view.op === i) {
        context.strokeStyle = colour("ink");
        context.lineWidth = 2;
        context.strokeRect(left, top + 1, Math.max(width - 0.8, 1), height - 2);
      }
      if (width > 14) {
        context.fillStyle = colour("on-bar");
        context.fillText(fitted(context, row.label(i), width - 8), left + 4, top + height / 2);
      }
    }
  }

  /** Lines over time. series: [{name, at, mean, least, most, holds, main, unit}]; under: drawn below them. */
  function lineLane(title, origin, unit, series, options = {}) {
    const every = series.flatMap((one) => finite(one.most || one.mean)).concat(options.values || []);
    const lowest = series.flatMap((one) => finite(one.least || one.mean)).concat(options.values || []);
    let high = options.high !== undefined ? options.high : most(every), low = options.zero === false ? least(lowest) : 0;
    if (options.zero === false) { const room = Math.max((high - low) * 0.15, Math.abs(high) * 0.01); low -= room; high += room; } else high *= 1.06;
    if (!(high > low)) high = low + 1;
    const height = options.height || 64;
    return {
      title, origin, height, series, unit,
      draw(context, view, top) {
        const y = (value) => top + height - (Math.min(value, high) - low) / (high - low) * height;
        context.strokeStyle = colour("line");
        context.lineWidth = 1;
        for (const value of [low, (low + high) / 2, high]) {
          context.beginPath(); context.moveTo(0, y(value)); context.lineTo(view.width, y(value)); context.stroke();
        }
        if (options.under) options.under(context, view, y);
        const many = series.filter((one) => !one.main).length;
        for (const one of series) if (!one.main) drawLine(context, view, one, y, options.colour, Math.max(0.25, 0.8 / Math.sqrt(many)), 1);
        series.filter((one) => one.main).forEach((one, place) => {
          context.setLineDash(DASHES[place % DASHES.length]);
          drawLine(context, view, one, y, options.colour, 1, 1.6);
        });
        context.setLineDash([]);
        context.font = "10px system-ui, sans-serif";
        context.textAlign = "right";
        context.textBaseline = "top";
        overLines(context, quantity(options.shownHigh === undefined ? high : options.shownHigh, unit), view.width - 4, top + 2);
        context.textBaseline = "bottom";
        overLines(context, quantity(low, unit), view.width - 4, top + height - 1);
        context.textAlign = "left";
      },
    };
  }

  function drawLine(context, view, one, y, name, alpha, width) {
    const first = Math.max(0, before(one.at, view.from) - 1), last = Math.min(one.at.length - 1, before(one.at, view.to) + 1);
    context.globalAlpha = alpha;
    if (one.least) band(context, view, one, y, name, first, last, alpha);
    context.strokeStyle = colour(name);
    context.lineWidth = width;
    context.beginPath();
    let pen = false, level = 0;
    for (let i = first; i <= last; i++) {
      const x = view.x(one.at[i]), value = one.mean[i];
      if (one.holds && pen) context.lineTo(x, level);
      if (value === null) { pen = false; continue; }
      level = y(value);
      if (pen) context.lineTo(x, level); else context.moveTo(x, level);
      pen = true;
    }
    context.stroke();
    context.globalAlpha = 1;
  }

  function band(context, view, one, y, name, first, last, alpha) {
    context.globalAlpha = 0.18 * alpha;
    context.fillStyle = colour(name);
    for (let i = first; i < last; i++) {
      if (one.least[i] === null) continue;
      const left = view.x(one.at[i]), right = view.x(one.at[i + 1]);
      context.fillRect(left, y(one.most[i]), right - left + 0.5, Math.max(y(one.least[i]) - y(one.most[i]), 1));
    }
    context.globalAlpha = alpha;
  }

  function valueAt(one, at) {
    const i = before(one.at, at);
    if (i < 0 || i >= one.at.length) return null;
    if (one.holds || one.mean[i] === null || i + 1 >= one.at.length || one.mean[i + 1] === null) return one.mean[i];
    const part = (at - one.at[i]) / (one.at[i + 1] - one.at[i] || 1);
    return one.mean[i] + part * (one.mean[i + 1] - one.mean[i]);
  }

  function quantities(tracks) {
    const found = new Map();
    for (const track of tracks) found.set(track.quantity, [...(found.get(track.quantity) || []), track]);
    return [...found.values()];
  }

  function trackLane(tracks, options = {}) {
    const one = tracks[0], name = ["voltage", "current"].includes(one.quantity) ? "other" : one.quantity;
    const cores = one.quantity === "utilisation" || one.quantity === "gpu";
    const zero = !["temperature", "frequency", "voltage"].includes(one.quantity);
    return lineLane(one.title, one.origin, one.unit, tracks, { colour: name, zero, ...(cores ? { high: 1.04, shownHigh: 1 } : {}), ...options });
  }

  // ---- the two models --------------------------------------------------------------------------------------

  function stepModel(step) {
    const op = step.op, text = (column, i) => step.texts[op[column][i]];
    const end = op.begin.map((begin, i) => begin + op.time[i]);
    const lanes = [barLane("phases", [spans(op, end, (i) => step.phases[op.phase[i]], (i) => step.phases[op.phase[i]])], 16)];
    const layers = layerRows(step, op, end, text);
    if (layers.length) lanes.push(barLane("layers", layers, 18));
    const ops = lanes.length;
    lanes.push(barLane("ops", [{
      begin: op.begin, end, colour: (i) => colour("c" + op.category[i]), label: (i) => text("name", i), mark: (i) => op.why[i] === 1, current: true,
    }], 32));
    const grouped = quantities(step.tracks);
    const powers = grouped.find((tracks) => tracks[0].quantity === "power");
    if (powers || step.energy) lanes.push(powerLane(step, op, end, powers || []));
    if (op.held.some((value) => value !== null)) lanes.push(heldLane(op, end));
    for (const tracks of grouped) if (["utilisation", "process", "gpu", "memory"].includes(tracks[0].quantity)) lanes.push(trackLane(tracks));
    return { span: step.span, unit: 1e-6, lanes, map: lanes[ops], op, end, tip: (at) => opTip(step, op, end, at), spanName: "step" };
  }

  /** Neighbours of the same name as one bar. */
  function spans(op, end, nameOf, phaseOf, labelOf) {
    const begin = [], stop = [], names = [], phases = [];
    for (let i = 0; i < op.begin.length; i++) {
      const name = nameOf(i);
      if (names.length && names[names.length - 1] === name && phases[phases.length - 1] === phaseOf(i)) stop[stop.length - 1] = end[i];
      else { begin.push(op.begin[i]); stop.push(end[i]); names.push(name); phases.push(phaseOf(i)); }
    }
    return { begin, end: stop, colour: (i) => names[i] === "" ? "transparent" : colour(phases[i]), label: (i) => (labelOf || ((name) => name))(names[i]), names };
  }

  /** The modules that ops came from: two levels from the top, then the layer itself. */
  function layerRows(step, op, end, text) {
    const depth = most(op.module.map((_, i) => text("module", i).split(".").length));
    const phase = (i) => step.phases[op.phase[i]];
    const prefix = (parts) => (i) => text("module", i).split(".").slice(0, parts).join(".");
    const rows = [];
    const levels = depth > 2 ? [1, 2, depth] : depth === 2 ? [1, 2] : [1];
    for (const level of levels) {
      const row = spans(op, end, prefix(level), phase, (name) => name);
      row.alpha = (i) => (i % 2 ? 0.62 : 0.8);
      if (row.names.some((name) => name !== "")) rows.push(row);
    }
    return rows;
  }

  function powerLane(step, op, end, tracks) {
    const energy = step.energy;
    const levels = energy ? finite(op.group.map((g) => (g < 0 ? null : energy.power[g]))) : [];
    // Room for most levels and intervals. Those that say next to nothing would press all others flat: they are cut off.
    const top = quantile(levels, 0.98) * 1.3;
    const ends = energy ? finite(op.group.map((g) => (g < 0 ? null : energy.power_high[g]))) : [];
    const lane = lineLane("power", tracks.length ? tracks[0].origin : energy.origin, "W", tracks, {
      colour: "power", values: levels.concat(ends).filter((value) => value <= top), height: 84,
      under(context, view, y) {
        if (!energy) return;
        const means = new Path2D(), intervals = new Path2D();
        for (let i = Math.max(0, before(op.begin, view.from)); i < op.begin.length && op.begin[i] <= view.to; i++) {
          const g = op.group[i];
          if (g < 0 || energy.power[g] === null) continue;
          const left = view.x(op.begin[i]), width = view.x(end[i]) - left, low = energy.power_low[g], high = energy.power_high[g];
          means.rect(left, y(energy.power[g]), width, y(0) - y(energy.power[g]));
          if (low !== null && high !== null && width > 2) intervals.rect(left, y(high), width, Math.max(1, y(low) - y(high)));
        }
        context.fillStyle = colour("power");
        context.globalAlpha = 0.22;
        context.fill(means);
        context.fill(intervals);
        context.globalAlpha = 1;
      },
    });
    if (energy) lane.aside = "filled: attributed to ops, with its 95 % interval";
    return lane;
  }

  function heldLane(op, end) {
    const at = [], mean = [];
    op.begin.forEach((begin, i) => { at.push(begin); mean.push(op.held[i]); });
    at.push(end[end.length - 1]); mean.push(null);
    const held = { name: "tensors", title: "tensors held", unit: "B", origin: "derived", holds: true, main: true, at, mean };
    return lineLane("tensors held", "derived", "B", [held], {
      colour: "memory",
      under(context, view, y) {
        const area = new Path2D();
        for (let i = Math.max(0, before(at, view.from)); i < at.length - 1 && at[i] <= view.to; i++) {
          if (mean[i] !== null) area.rect(view.x(at[i]), y(mean[i]), view.x(at[i + 1]) - view.x(at[i]), y(0) - y(mean[i]));
        }
        context.fillStyle = colour("memory");
        context.globalAlpha = 0.18;
        context.fill(area);
        context.globalAlpha = 1;
      },
    });
  }

  function runModel(run) {
    const steps = { begin: run.begin, end: run.end, colour: (i) => colour(i % 2 ? "forward" : "backward"), label: (i) => run.each > 1 ? `from ${i * run.each + 1}` : String(i + 1) };
    const lanes = [];
    if (run.begin.length) lanes.push(barLane("steps", [steps], 16));
    for (const tracks of quantities(run.tracks)) lanes.push(trackLane(tracks, { height: 56 }));
    return { span: run.span, unit: 1, lanes, map: lanes[0], tip: (at) => runTip(run, at), spanName: "run" };
  }

  // ---- what the tip says -----------------------------------------------------------------------------------

  function opTip(step, op, end, at) {
    let i = before(op.begin, at);
    if (i >= 0 && at > end[i] + 1e-9) i = -1;
    const lines = [["at", quantity(at * 1e-6, "s")]];
    if (i < 0) return { op: -1, title: "between ops", where: "", lines };
    return { op: i, title: step.texts[op.name[i]], where: step.texts[op.kind[i]], lines: lines.concat(opLines(step, op, i)) };
  }

  function opLines(step, op, i) {
    const text = (column) => step.texts[op[column][i]], lines = [];
    const why = ["first time", "recomputed", "waits for storage"][op.why[i]];
    if (text("module")) lines.push(["layer", text("module")]);
    lines.push(["phase", `${step.phases[op.phase[i]]}, ${why}`]);
    if (most(op.part) > 0) lines.push(["micro-batch", String(op.part[i] + 1)]);
    const seconds = op.middle[i] * 1e-6;
    lines.push(["time here", quantity(op.time[i] * 1e-6, "s")]);
    lines.push([`median of ${step.steps}`, `${quantity(seconds, "s")} (${range(op.low[i] * 1e-6, op.high[i] * 1e-6, seconds, "s")})`]);
    if (op.flops[i]) lines.push(["work", quantity(op.flops[i], "FLOP") + (seconds ? `, ${quantity(op.flops[i] / seconds, "FLOP")}/s` : "")]);
    const bytes = op.read[i] + op.written[i];
    if (bytes) lines.push(["reads, writes", `${quantity(op.read[i], "B")}, ${quantity(op.written[i], "B")}` + (seconds ? ` (${quantity(bytes / seconds, "B")}/s)` : "")]);
    if (op.held[i] !== null) lines.push(["tensors held", quantity(op.held[i], "B")]);
    return lines.concat(energyLines(step.energy, op.group[i]));
  }

  function energyLines(energy, group) {
    if (!energy) return [["energy", "unavailable"]];
    if (group < 0 || energy.amount[group] === null) return [["energy", "no figure: no sample met it"]];
    const amount = energy.amount[group], ends = range(energy.low[group], energy.high[group], amount, "J"), others = energy.count[group] - 1;
    const lines = [[`energy, ${energy.origin}`, quantity(amount, "J") + (ends ? ` (${ends})` : "")]];
    if (others > 0) lines.push(["merged", `with ${others} other op${others > 1 ? "s" : ""}: one figure for all`]);
    return lines;
  }

  function runTip(run, at) {
    const i = before(run.begin, at);
    const inside = i >= 0 && at <= run.end[i];
    const title = !inside ? "outside of steps" : run.each > 1 ? `steps from ${i * run.each + 1}` : `step ${i + 1}`;
    return { op: inside ? i : -1, title, where: "", lines: [["at", quantity(at, "s")]] };
  }

  /** What the first lines of each lane say at a time. */
  function trackLines(lanes, at, each) {
    const lines = [];
    for (const lane of lanes) {
      if (!lane.series) continue;
      const main = lane.series.filter((each) => each.main), several = main.length > 1 && each > 1;
      for (const one of main.slice(0, each)) {
        const value = valueAt(one, at);
        if (one.title !== "tensors held") lines.push([several ? `${lane.title}: ${one.name}` : lane.title, value === null ? "no sample" : quantity(value, lane.unit)]);
      }
    }
    return lines;
  }

  // ---- a view ----------------------------------------------------------------------------------------------

  class View {
    constructor(root, model) {
      Object.assign(this, { root, model, from: 0, to: model.span, width: 0, at: null, op: -1, fingers: new Map(), drag: null, due: false });
      this.height = MAP + AXIS + model.lanes.reduce((sum, lane) => sum + lane.height + TITLE + GAP, 0) + BOTTOM;
      this.build();
      this.listen();
      new ResizeObserver(() => this.resize()).observe(root);
      this.resize();
    }

    build() {
      this.root.replaceChildren();
      const tools = make("div", "tools");
      const button = (text, label, act) => {
        const made = make("button", "", text);
        made.type = "button";
        made.title = label;
        made.setAttribute("aria-label", label);
        made.addEventListener("click", act);
        tools.append(made);
      };
      button("+", "zoom in", () => this.zoom(0.5));
      button("−", "zoom out", () => this.zoom(2));
      button("◀", "move left", () => this.pan(-0.3));
      button("▶", "move right", () => this.pan(0.3));
      button(`whole ${this.model.spanName}`, "show all", () => this.show(0, this.model.span));
      this.told = make("span", "told");
      tools.append(this.told);
      this.canvas = make("canvas");
      this.canvas.tabIndex = 0;
      this.canvas.setAttribute("role", "img");
      this.canvas.setAttribute("aria-label", `timeline: ${this.model.lanes.map((lane) => lane.title).join(", ")}. Keys: + and − zoom, arrows move, comma and full stop go from op to op, 0 shows all.`);
      this.tip = make("div", "tip");
      this.tip.setAttribute("role", "status");
      this.tip.hidden = true;
      const touch = matchMedia("(pointer: coarse)").matches;
      this.hint = make("p", "hint", touch ? "Pinch to zoom, drag to move, tap for what is there."
        : "Drag to zoom into a part, or Ctrl + wheel; double-click goes back. With the drawing in focus: + − 0, arrows, and , . from op to op.");
      this.root.append(tools, this.canvas, this.tip, this.hint);
    }

    resize() {
      const width = this.root.clientWidth, ratio = window.devicePixelRatio || 1;
      if (!width) return;
      this.width = width;
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(this.height * ratio);
      this.canvas.style.height = this.height + "px";
      this.canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
      this.paint();
    }

    x(at) { return (at - this.from) / (this.to - this.from) * this.width; }
    time(x) { return this.from + x / this.width * (this.to - this.from); }

    show(from, to) {
      const span = this.model.span, size = Math.min(Math.max(to - from, span * LEAST), span);
      const begin = Math.min(Math.max(from + (to - from - size) / 2, 0), span - size);
      this.from = begin;
      this.to = begin + size;
      this.draw();
    }

    zoom(factor, at) {
      const middle = at === undefined ? (this.from + this.to) / 2 : at;
      this.show(middle - (middle - this.from) * factor, middle + (this.to - middle) * factor);
    }

    pan(part) {
      const by = part * (this.to - this.from);
      this.show(this.from + by, this.to + by);
    }

    /** Zoom to an op, and say what it is. */
    find(place) {
      const { op, end } = this.model, i = op.place.indexOf(place);
      if (i < 0) return;
      const middle = (op.begin[i] + end[i]) / 2, room = Math.max(6 * op.time[i], this.model.span * LEAST);
      this.show(middle - room, middle + room);
      this.point(middle);
    }

    draw() {
      if (this.due) return;
      this.due = true;
      requestAnimationFrame(() => { this.due = false; this.paint(); });
    }

    paint() {
      const context = this.canvas.getContext("2d");
      context.clearRect(0, 0, this.width, this.height);
      this.paintMap(context);
      this.paintAxis(context);
      let top = MAP + AXIS;
      for (const lane of this.model.lanes) {
        this.paintTitle(context, lane, top);
        context.save();
        context.beginPath();
        context.rect(0, top + TITLE - 1, this.width, lane.height + 2);
        context.clip();
        lane.draw(context, this, top + TITLE);
        context.restore();
        top += lane.height + TITLE + GAP;
      }
      this.paintPointer(context);
      const unit = this.model.unit;
      this.told.textContent = `${quantity((this.to - this.from) * unit, "s")} of ${quantity(this.model.span * unit, "s")}, from ${quantity(this.from * unit, "s")}`;
      Object.assign(this.root.dataset, { from: this.from, to: this.to, drawn: "true" });
    }

    paintMap(context) {
      const whole = { from: 0, to: this.model.span, width: this.width, x: (at) => at / this.model.span * this.width };
      context.save();
      context.beginPath();
      context.rect(0, 0, this.width, MAP - 4);
      context.clip();
      context.globalAlpha = 0.7;
      if (this.model.map) this.model.map.drawMap(context, whole, MAP - 4);
      context.restore();
      if (this.to - this.from >= this.model.span) return;
      const left = whole.x(this.from), right = whole.x(this.to);
      context.fillStyle = colour("page");
      context.globalAlpha = 0.72;
      context.fillRect(0, 0, left, MAP - 4);
      context.fillRect(right, 0, this.width - right, MAP - 4);
      context.globalAlpha = 1;
      context.strokeStyle = colour("ink");
      context.lineWidth = 1.5;
      context.strokeRect(left, 0.75, Math.max(right - left, 3), MAP - 5.5);
    }

    paintAxis(context) {
      const unit = this.model.unit, [name, size] = scaleOf((this.to - this.from) * unit / 2, "s");
      const low = this.from * unit / size, high = this.to * unit / size, rough = (high - low) / Math.max(2, this.width / 90);
      const power = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
      const places = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
      context.font = "10px system-ui, sans-serif";
      context.textBaseline = "middle";
      context.lineWidth = 1;
      for (let n = Math.ceil(low / step); n * step <= high; n++) {
        const x = this.x(n * step * size / unit), text = (n * step).toFixed(Math.min(places, 9)) + " " + name;
        context.strokeStyle = colour("line");
        context.beginPath(); context.moveTo(x, MAP); context.lineTo(x, this.height); context.stroke();
        context.fillStyle = colour("soft");
        if (x + context.measureText(text).width + 4 < this.width) context.fillText(text, x + 3, MAP + AXIS / 2 - 2);
      }
    }

    paintTitle(context, lane, top) {
      context.font = "600 11px system-ui, sans-serif";
      context.textBaseline = "middle";
      context.fillStyle = colour("ink");
      context.fillText(lane.title, 4, top + TITLE / 2 - 1);
      let left = 10 + context.measureText(lane.title).width;
      context.font = "10px system-ui, sans-serif";
      if (lane.origin) {
        context.fillStyle = colour(lane.origin);
        context.fillText(lane.origin, left, top + TITLE / 2 - 1);
        left += 8 + context.measureText(lane.origin).width;
      }
      const lines = (lane.series || []).filter((one) => one.main).map((one) => one.name), others = (lane.series || []).length - lines.length;
      const aside = [lines.join(", ") + (others ? `; thin: ${others} more` : ""), lane.aside || ""].filter((text) => text).join(" · ");
      if (!aside || aside === lane.title) return;
      context.fillStyle = colour("soft");
      context.fillText(fitted(context, aside, this.width - left - 8), left, top + TITLE / 2 - 1);
    }

    paintPointer(context) {
      if (this.drag && this.drag.kind === "select") {
        const [left, right] = [this.drag.first, this.drag.last].sort((a, b) => a - b);
        context.fillStyle = colour("accent");
        context.globalAlpha = 0.18;
        context.fillRect(left, MAP, right - left, this.height);
        context.globalAlpha = 1;
      }
      if (this.at === null || this.at < this.from || this.at > this.to) return;
      context.strokeStyle = colour("ink");
      context.lineWidth = 1;
      context.globalAlpha = 0.6;
      context.beginPath(); context.moveTo(this.x(this.at), MAP); context.lineTo(this.x(this.at), this.height); context.stroke();
      context.globalAlpha = 1;
    }

    // What is there

    point(at, y) {
      this.at = at;
      const told = this.model.tip(at);
      this.op = told.op;
      this.root.dataset.op = told.op;
      this.tip.replaceChildren(make("b", "", told.title));
      if (told.where) this.tip.append(make("div", "where", told.where));
      const list = make("dl");
      for (const [name, text] of told.lines.concat(trackLines(this.model.lanes, at, this.model.op ? 1 : 4))) list.append(make("dt", "", name), make("dd", "", text));
      this.tip.append(list);
      this.tip.hidden = false;
      this.place(this.x(at), y === undefined ? MAP + AXIS + 60 : y);
      this.draw();
    }

    place(x, y) {
      const wide = this.tip.offsetWidth, beside = x + 18 + wide < this.width ? x + 18 : Math.max(0, x - wide - 18);
      this.tip.style.left = beside + "px";
      this.tip.style.top = this.canvas.offsetTop + Math.max(0, Math.min(y + 12, this.height - this.tip.offsetHeight)) + "px";
    }

    leave() {
      if (this.at === null) return;
      this.at = null;
      this.op = -1;
      this.tip.hidden = true;
      this.draw();
    }

    // Pointer, wheel, keys

    listen() {
      const on = (name, act, options) => this.canvas.addEventListener(name, act.bind(this), options);
      on("pointerdown", this.down);
      on("pointermove", this.move);
      on("pointerup", this.up);
      on("pointercancel", this.up);
      on("pointerleave", (event) => { if (event.pointerType === "mouse" && !this.drag) this.leave(); });
      on("dblclick", () => this.show(0, this.model.span));
      on("wheel", this.wheel, { passive: false });
      on("keydown", this.key);
    }

    spot(event) {
      const box = this.canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    }

    down(event) {
      const [x, y] = this.spot(event);
      this.fingers.set(event.pointerId, x);
      this.canvas.setPointerCapture(event.pointerId);
      if (this.fingers.size === 2) { this.drag = this.pinch(); return; }
      const kind = y < MAP ? "map" : event.pointerType === "touch" ? "pan" : event.shiftKey ? "pan" : "select";
      this.drag = { kind, first: x, last: x, from: this.from, to: this.to };
      if (kind === "map") this.centre(x);
    }

    pinch() {
      const [a, b] = [...this.fingers.values()];
      return { kind: "pinch", size: Math.max(Math.abs(a - b), 10), middle: this.time((a + b) / 2), from: this.from, to: this.to };
    }

    centre(x) {
      const half = (this.to - this.from) / 2, at = x / this.width * this.model.span;
      this.show(at - half, at + half);
    }

    move(event) {
      const [x, y] = this.spot(event), drag = this.drag;
      if (this.fingers.has(event.pointerId)) this.fingers.set(event.pointerId, x);
      if (!drag) { if (event.pointerType === "mouse" || event.pointerType === "pen") this.point(this.time(x), y); return; }
      if (drag.kind === "pinch" && this.fingers.size === 2) this.spread(drag);
      else if (drag.kind === "map") this.centre(x);
      else if (drag.kind === "pan") {
        drag.last = x;
        const by = (drag.first - x) / this.width * (drag.to - drag.from);
        this.show(drag.from + by, drag.to + by);
      } else if (drag.kind === "select") { drag.last = x; this.draw(); }
    }

    spread(drag) {
      const [a, b] = [...this.fingers.values()], factor = drag.size / Math.max(Math.abs(a - b), 10);
      const size = (drag.to - drag.from) * factor, part = (a + b) / 2 / this.width;
      this.show(drag.middle - part * size, drag.middle + (1 - part) * size);
    }

    up(event) {
      const [x, y] = this.spot(event), drag = this.drag;
      this.fingers.delete(event.pointerId);
      this.drag = null;
      if (!drag || drag.kind === "map" || drag.kind === "pinch" || event.type === "pointercancel") { this.draw(); return; }
      const moved = Math.abs(x - drag.first) > 4;
      if (drag.kind === "select" && moved) {
        const [from, to] = [this.time(drag.first), this.time(x)].sort((a, b) => a - b);
        this.show(from, to);
      } else if (!moved) this.point(this.time(x), y);
      this.draw();
    }

    wheel(event) {
      const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
      // A page must still scroll when the pointer happens to be over a drawing.
      if (!event.ctrlKey && !event.metaKey && !sideways && document.activeElement !== this.canvas) return;
      if (sideways && this.to - this.from >= this.model.span) return;
      event.preventDefault();
      const pixels = event.deltaMode === 1 ? 30 : 1;
      if (sideways) this.pan(event.deltaX * pixels / this.width);
      else this.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY * pixels * 0.004))), this.time(this.spot(event)[0]));
    }

    key(event) {
      const acts = {
        "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), ArrowLeft: () => this.pan(-0.15), ArrowRight: () => this.pan(0.15),
        0: () => this.show(0, this.model.span), Home: () => this.show(0, this.model.span), Escape: () => this.leave(), ",": () => this.step(-1), ".": () => this.step(1),
      };
      if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in acts)) return;
      event.preventDefault();
      acts[event.key]();
    }

    /** To the op before or after the one that is pointed at. */
    step(by) {
      const { op, end } = this.model;
      if (!op) return;
      const now = this.at === null ? (by > 0 ? -1 : op.begin.length) : before(op.begin, this.at);
      const i = Math.min(Math.max(now + by, 0), op.begin.length - 1), middle = (op.begin[i] + end[i]) / 2;
      if (middle < this.from || middle > this.to) { const half = (this.to - this.from) / 2; this.show(middle - half, middle + half); }
      this.point(middle);
    }
  }

  // ---- tables ----------------------------------------------------------------------------------------------

  function sortable(table) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, place) => head.querySelector("button").addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") === "descending" || (place === 0 && head.getAttribute("aria-sort") === "none");
      heads.forEach((other) => other.setAttribute("aria-sort", other === head ? (up ? "ascending" : "descending") : "none"));
      sortBy(table.tBodies[0], place, up ? 1 : -1);
    }));
  }

  /** By the number of a cell, or its text in the first column. What has no number comes last either way. */
  function sortBy(body, place, sign) {
    const keyed = [...body.rows].map((row) => {
      const cell = row.cells[place];
      return [place === 0 ? cell.textContent : cell.dataset.v === undefined ? null : Number(cell.dataset.v), row];
    });
    keyed.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null);
      return sign * (place === 0 ? a.localeCompare(b, "en", { numeric: true }) : a - b);
    });
    body.append(...keyed.map(([, row]) => row));
  }

  function breakdown(root, view) {
    const tabs = [...root.querySelectorAll(".tabs button")], parts = [...root.querySelectorAll(".tab")];
    const choose = (which) => {
      tabs.forEach((tab) => tab.setAttribute("aria-pressed", String(tab.dataset.tab === which)));
      parts.forEach((part) => { part.hidden = part.dataset.tab !== which; });
    };
    tabs.forEach((tab) => tab.addEventListener("click", () => choose(tab.dataset.tab)));
    choose(tabs[0].dataset.tab);
    root.querySelectorAll("table").forEach(sortable);
    root.querySelectorAll(".more").forEach((button) => button.addEventListener("click", () => {
      const short = button.parentElement.querySelector("table").classList.toggle("short");
      button.textContent = short ? `show all ${button.dataset.all}` : "show fewer";
    }));
    root.addEventListener("click", (event) => {
      const found = event.target.closest(".find");
      if (!found || !view) return;
      view.find(Number(found.dataset.place));
      view.root.scrollIntoView({ block: "nearest", behavior: "smooth" });
    });
  }

  // ---- all of it -------------------------------------------------------------------------------------------

  const views = [], steps = new Map();
  for (const root of document.querySelectorAll(".view")) {
    const run = DATA.runs[Number(root.dataset.run)], which = root.dataset.view;
    const view = new View(root, which === "step" ? stepModel(run.step) : runModel(run.run));
    views.push(view);
    if (which === "step") steps.set(root.dataset.run, view);
  }
  for (const root of document.querySelectorAll(".breakdown")) breakdown(root, steps.get(root.dataset.run));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { colours = {}; views.forEach((view) => view.draw()); });
})();
