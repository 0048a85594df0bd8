// Elements, colours of the style sheet, and searches in columns of numbers.

function make(kind, style, text) {
  const element = document.createElement(kind);
  if (style) element.className = style;
  if (text !== undefined) element.textContent = text;
  return element;
}

let colours = {};
function colour(name) {
  if (!(name in colours)) {
    colours[name] = getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim() || "#888";
  }
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
function quantile(values, part) {
  return values.length ? [...values].sort((a, b) => a - b)[Math.floor(part * (values.length - 1))] : 0;
}

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
