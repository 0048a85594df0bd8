// A timeline on a canvas, with zoom and hover by mouse, wheel, fingers, keys and buttons.
//
//   map      ▁▁▁▁▁████▁▁▁▁      the whole span, and the part that shows
//   axis     0    2    4 ms
//   lanes    │conv ││norm │
//
// Every text is set as text, never as markup. What shows is in data-from, data-to and data-op of the element, where a
// test can read it.

const MAP = 14, AXIS = 20, GAP = 10, TITLE = 16, BOTTOM = 6;
const LEAST = 1e-5; // of the span: the most that one can zoom in

class View {
  constructor(root, model) {
    Object.assign(this, { root, model, from: 0, to: model.span, width: 0, due: false }); // what shows
    Object.assign(this, { at: null, op: -1, fingers: new Map(), drag: null }); // what the pointer does
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
    this.shown = make("span", "shown");
    tools.append(this.shown);
    this.canvas = make("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    const lanes = this.model.lanes.map((lane) => lane.title).join(", ");
    const keys = "Keys: + and − zoom, arrows move, comma and full stop go from op to op, 0 shows all.";
    this.canvas.setAttribute("aria-label", `timeline: ${lanes}. ${keys}`);
    this.tip = make("div", "tip");
    this.tip.setAttribute("role", "status");
    this.tip.hidden = true;
    const touch = matchMedia("(pointer: coarse)").matches;
    this.hint = make("p", "hint", touch ? "Pinch to zoom, drag to move, tap for what is there."
      : "Drag to zoom into a part, or Ctrl + wheel; double-click goes back. With the drawing in focus: + − 0, arrows, "
        + "and , . from op to op.");
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
    const [part, span, from] = [this.to - this.from, this.model.span, this.from].map((at) => quantity(at * unit, "s"));
    this.shown.textContent = `${part} of ${span}, from ${from}`;
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
    const low = this.from * unit / size, high = this.to * unit / size;
    const rough = (high - low) / Math.max(2, this.width / 90), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((size_) => size_ >= rough * 0.999);
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
    let right = this.width - 4;
    if (lane.ends) { // where no line strikes it through
      context.textAlign = "right";
      context.fillStyle = colour("soft");
      context.fillText(lane.ends, right, top + TITLE / 2 - 1);
      context.textAlign = "left";
      right -= context.measureText(lane.ends).width + 12;
    }
    const series = lane.series || [], main = series.filter((one) => one.main);
    const dashed = (one, place) => (main.length > 1 ? `${DASHED[place % DASHED.length]} ${one.name}` : one.name);
    const lines = main.map(dashed), leftOut = series.length - lines.length;
    const others = leftOut ? `; ${leftOut} more as thin lines` : "";
    const aside = [lines.join(", ") + others, lane.aside || ""].filter((text) => text).join(" · ");
    if (!aside || aside === lane.title || right <= left) return;
    context.fillStyle = colour("soft");
    context.fillText(fitted(context, aside, right - left), left, top + TITLE / 2 - 1);
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
    context.beginPath();
    context.moveTo(this.x(this.at), MAP);
    context.lineTo(this.x(this.at), this.height);
    context.stroke();
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
    const lines = told.lines.concat(trackLines(this.model.lanes, at, this.model.op ? 1 : 4));
    for (const [name, text] of lines) list.append(make("dt", "", name), make("dd", "", text));
    this.tip.append(list);
    this.tip.hidden = false;
    this.place(this.x(at), y === undefined ? MAP + AXIS + 60 : y);
    this.draw();
  }

  place(x, y) {
    const wide = this.tip.offsetWidth, beside = x + 18 + wide < this.width ? x + 18 : Math.max(0, x - wide - 18);
    this.tip.style.left = beside + "px";
    const below = Math.max(0, Math.min(y + 12, this.height - this.tip.offsetHeight));
    this.tip.style.top = this.canvas.offsetTop + below + "px";
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
    const size = Math.max(Math.abs(a - b), 10);
    return { kind: "pinch", size, middle: this.time((a + b) / 2), from: this.from, to: this.to };
  }

  centre(x) {
    const half = (this.to - this.from) / 2, at = x / this.width * this.model.span;
    this.show(at - half, at + half);
  }

  move(event) {
    const [x, y] = this.spot(event), drag = this.drag;
    if (this.fingers.has(event.pointerId)) this.fingers.set(event.pointerId, x);
    if (!drag) {
      if (event.pointerType !== "touch") this.point(this.time(x), y);
      return;
    }
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
    if (!drag || drag.kind === "map" || drag.kind === "pinch" || event.type === "pointercancel") return this.draw();
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
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2),
      ArrowLeft: () => this.pan(-0.15), ArrowRight: () => this.pan(0.15),
      0: () => this.show(0, this.model.span), Home: () => this.show(0, this.model.span),
      ",": () => this.step(-1), ".": () => this.step(1), Escape: () => this.leave(),
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
    const half = (this.to - this.from) / 2;
    if (middle < this.from || middle > this.to) this.show(middle - half, middle + half);
    this.point(middle);
  }
}
