// Values with their units, as the server writes them (fl_web/rendering.py, fl_common/units.py).

const BINARY = ["KiB", "MiB", "GiB", "TiB", "PiB"];

export function size(bytes) {
  if (bytes < 1024) return `${Math.round(bytes)} B`;
  let value = bytes / 1024, unit = 0;
  while (Math.round(value) >= 1024 && unit < BINARY.length - 1) { value /= 1024; unit += 1; }
  return `${value < 9.95 ? value.toFixed(1) : Math.round(value)} ${BINARY[unit]}`;
}

export function duration(seconds) {
  if (seconds < 9.95) return `${seconds.toFixed(2)} s`;
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

function number(value) {
  return Math.abs(value) >= 100000 ? value.toExponential(3) : String(Number(value.toPrecision(4)));
}

const UNITS = { share: (v) => `${(100 * v).toFixed(2)} %`, bytes: size, seconds: duration, number };

export function inUnit(value, unit) {
  return value === null || value === undefined ? "-" : UNITS[unit](value);
}

export function tick(value, unit) {
  if (unit === "share") return `${Number((100 * value).toPrecision(4))} %`;
  if (unit === "seconds") return value < 60 ? `${Number(value.toPrecision(3))} s` : duration(value).replace(/ 00 s| 00 min/, "");
  return inUnit(value, unit);
}

export const AXIS_UNIT = { rounds: "number", bytes: "bytes", time: "seconds" };

export function elapsed(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  return whole < 60 ? `${whole} s` : duration(whole);
}

export function ago(milliseconds) {
  const past = milliseconds >= 0, seconds = Math.abs(milliseconds) / 1000;
  let text = `${Math.floor(seconds)} s`;
  for (const [length, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (seconds >= length) { text = `${Math.floor(seconds / length)} ${unit}`; break; }
  }
  return past ? `${text} ago` : `in ${text}`;
}
