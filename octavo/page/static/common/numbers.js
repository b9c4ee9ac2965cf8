// Numbers as people read them: three digits that matter, and their unit.

const WHOLE = new Intl.NumberFormat("en"); // made once: toLocaleString makes one each time
const DECIMAL = [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3], ["", 1]];
const BINARY = [["Ti", 2 ** 40], ["Gi", 2 ** 30], ["Mi", 2 ** 20], ["Ki", 2 ** 10], ["", 1]];
const SMALL = [["", 1], ["m", 1e-3], ["µ", 1e-6], ["n", 1e-9]];
// Units that take a prefix, and which; "iB" are bytes in powers of 1024, as memory is sold.
const PREFIXES = {
  B: ["B", DECIMAL], "B/s": ["B/s", DECIMAL], iB: ["B", BINARY], s: ["s", SMALL],
  FLOP: ["FLOP", DECIMAL], "FLOP/s": ["FLOP/s", DECIMAL],
};

const SINGULAR = { bits: "bit", requests: "request", tokens: "token" };

/** What to divide a value of this unit by, and what its unit is then: `{ divisor, suffix }`. */
export function scaleOf(value, unit = "") {
  if (unit === "%") return { divisor: 0.01, suffix: "%" };
  const [name, prefixes] = PREFIXES[unit] ?? [unit, null];
  if (prefixes === null) return { divisor: 1, suffix: name };
  const size = Math.abs(value);
  // 999.6 would be shown as 1,000 of the smaller one.
  const found = prefixes.find(([, factor]) => size >= factor * 0.9995);
  const [prefix, divisor] = size === 0 || !Number.isFinite(size) ? ["", 1] : (found ?? prefixes.at(-1));
  return { divisor, suffix: prefix + name };
}

/** "12.3 GB", "4.56 ms", "1,234 tokens", "$0.12". */
export function format(value, unit = "") {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const { divisor, suffix } = scaleOf(value, unit);
  return withUnit(digits(value / divisor), suffix);
}

/** "1.2–1.5 ms"; one number where both ends look the same. */
export function formatRange(low, high, unit = "") {
  const { divisor, suffix } = scaleOf(high, unit);
  const ends = [digits(low / divisor), digits(high / divisor)];
  return withUnit(ends[0] === ends[1] ? ends[0] : ends.join("–"), suffix);
}

/** A number alone: three digits, more only of whole numbers. */
export function digits(value) {
  if (value < 0) return `−${digits(-value)}`;
  if (!Number.isFinite(value)) return "∞";
  if (value >= 1e6) return compact(value);
  if (value >= 100 || Number.isInteger(value)) return WHOLE.format(Math.round(value));
  if (value !== 0 && value < 1e-3) return value.toExponential(1).replace("e-", " × 10⁻").replace(/\d+$/, raised);
  return String(Number(value.toPrecision(3)));
}

/** "1k", "1.5M": for the ticks of an axis. */
export function compact(value) {
  if (value < 0) return `−${compact(-value)}`;
  const [prefix, factor] = [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e3], ["", 1]].find(
    ([, factor]) => value >= factor,
  ) ?? ["", 1];
  return `${Number((value / factor).toPrecision(3))}${prefix}`;
}

function withUnit(text, suffix) {
  if (suffix === "") return text;
  if (suffix === "$") return `$${text}`;
  if (suffix === "%" || suffix === "×") return text + suffix;
  return `${text} ${text === "1" ? (SINGULAR[suffix] ?? suffix) : suffix}`;
}

function raised(exponent) {
  return [...exponent].map((digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(digit)]).join("");
}
