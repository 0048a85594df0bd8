// Numbers as people read them, as numbers.py writes them in the page's text.

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
  const found = sizes.find(([, size]) => Math.abs(value) >= 0.9995 * size);
  return found || (value ? sizes[sizes.length - 1] : sizes.find(([, size]) => size === 1));
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
  const from = digits(low / size);
  return high === null ? `from ${from} ${name}` : `${from} to ${digits(high / size)} ${name}`;
}
