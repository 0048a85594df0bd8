// What is drawn below each other: bars (phases, layers, ops, steps) and lines (power, cores, memory …).
//
// A lane has a title, a height and draw(context, view, top). It knows nothing of the pointer.

const DASHES = [[], [5, 3], [2, 3], [8, 3, 2, 3]]; // lines of one lane, in the order of their names
const DASHED = ["—", "╌", "┈", "–·"]; // the same beside the names

/** Bars in rows. A row: {begin, end, colour(i), label(i), mark(i)}; marked ones are recomputed. */
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
      context.fillStyle = colour("recomputed");
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
  let high = options.high !== undefined ? options.high : most(every), low = 0;
  if (options.zero === false) {
    low = least(lowest);
    const room = Math.max((high - low) * 0.15, Math.abs(high) * 0.01);
    low -= room;
    high += room;
  } else high *= 1.06;
  if (!(high > low)) high = low + 1;
  const height = options.height || 64, shown = options.shownHigh === undefined ? high : options.shownHigh;
  return {
    title, origin, height, series, unit, ends: `${low ? quantity(low, unit) : "0"} to ${quantity(shown, unit)}`,
    draw(context, view, top) {
      const y = (value) => top + height - (Math.min(value, high) - low) / (high - low) * height;
      context.strokeStyle = colour("line");
      context.lineWidth = 1;
      for (const value of [low, (low + high) / 2, high]) {
        context.beginPath(); context.moveTo(0, y(value)); context.lineTo(view.width, y(value)); context.stroke();
      }
      if (options.under) options.under(context, view, y);
      const many = series.filter((one) => !one.main).length;
      const faint = Math.max(0.25, 0.8 / Math.sqrt(many));
      for (const one of series) if (!one.main) drawLine(context, view, one, y, options.colour, faint, 1);
      series.filter((one) => one.main).forEach((one, place) => {
        context.setLineDash(DASHES[place % DASHES.length]);
        drawLine(context, view, one, y, options.colour, 1, 1.6);
      });
      context.setLineDash([]);
    },
  };
}

function drawLine(context, view, one, y, name, alpha, width) {
  const first = Math.max(0, before(one.at, view.from) - 1);
  const last = Math.min(one.at.length - 1, before(one.at, view.to) + 1);
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
  const bounds = cores ? { high: 1.04, shownHigh: 1 } : {};
  return lineLane(one.title, one.origin, one.unit, tracks, { colour: name, zero, ...bounds, ...options });
}
