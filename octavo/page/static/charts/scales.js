// From values to places on an axis, and the values that are written beside it.

import { compact, format, scaleOf } from "../common/numbers.js";

/**
 * An axis `{ label, unit, scale: "linear" | "log", min, max, isWhole }` laid from pixel `from` to `to`:
 * `{ at(value), from, to, title, ticks: [{ at, text }] }`. What it leaves open is found of `values`.
 */
export function layAxis(axis, values, from, to) {
  const isLog = axis.scale === "log";
  const known = values.filter((value) => Number.isFinite(value) && (!isLog || value > 0));
  const [min, max] = isLog ? logBounds(axis, known) : linearBounds(axis, known);
  const turn = isLog ? Math.log : (value) => value;
  const span = turn(max) - turn(min);
  const at = (value) => {
    const share = (turn(Math.max(value, isLog ? min / 1e9 : -Infinity)) - turn(min)) / span;
    return from + (to - from) * Math.min(4, Math.max(-4, share));
  };
  const room = Math.max(2, Math.floor(Math.abs(to - from) / (from < to ? 76 : 30)));
  const { divisor, suffix } = isLog ? { divisor: 1, suffix: "" } : scaleOf(max, axis.unit);
  const texts = isLog
    ? (axis.unit === "iB" ? binaryTicks : logTicks)(min, max, room).map((value) => [value, textOnLog(value, axis.unit)])
    : linearTicks(min / divisor, max / divisor, room, axis.isWhole).map((tick) => [tick * divisor, compact(tick)]);
  const unit = isLog ? unitOnLog(axis.unit) : suffix;
  return {
    at, from, to, min, max,
    title: unit && !axis.label.includes(unit) ? `${axis.label} (${unit})` : axis.label,
    ticks: texts.map(([value, text]) => ({ at: at(value), text })),
  };
}

function linearBounds(axis, values) {
  const min = axis.min ?? Math.min(0, ...values);
  const max = axis.max ?? Math.max(min, ...values) * 1.05;
  return max > min ? [min, max] : [min, min + 1];
}

function logBounds(axis, values) {
  const min = axis.min ?? Math.min(...values, Infinity);
  const max = axis.max ?? Math.max(...values, 0);
  if (!(min > 0) || !(max > 0) || min === Infinity) return [1, 10];
  return max > min ? [min, max] : [min / 2, min * 2];
}

/** At most `room` + 1 round values between the bounds; whole ones of what is counted. */
function linearTicks(min, max, room, isWhole = false) {
  const rough = (max - min) / room;
  const power = 10 ** Math.floor(Math.log10(rough));
  const round = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999) * power;
  const step = isWhole ? Math.max(1, Math.ceil(round)) : round;
  const ticks = [];
  for (let index = Math.ceil(min / step - 1e-9); index * step <= max * (1 + 1e-9); index += 1) {
    ticks.push(Number((index * step).toPrecision(12)));
  }
  return ticks;
}

function logTicks(min, max, room) {
  const decades = Math.log10(max / min);
  const marks = decades < 1.5 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil((decades * marks.length) / room));
  const ticks = [];
  for (let power = Math.floor(Math.log10(min)); power <= Math.ceil(Math.log10(max)); power += 1) {
    if (marks.length === 1 && power % every !== 0) continue;
    for (const mark of marks) {
      const value = mark * 10 ** power;
      if (value >= min * 0.999 && value <= max * 1.001) ticks.push(value);
    }
  }
  return ticks;
}

/** Powers of two, as memory is told in them. */
function binaryTicks(min, max, room) {
  const first = Math.ceil(Math.log2(min) - 1e-9);
  const last = Math.floor(Math.log2(max) + 1e-9);
  const every = [1, 2, 5, 10, 20].find((step) => (last - first) / step <= room) ?? 20;
  const ticks = [];
  for (let power = Math.ceil(first / every) * every; power <= last; power += every) ticks.push(2 ** power);
  return ticks;
}

const TOLD_BY_TICKS = ["B", "iB", "s", "FLOP", "B/s", "FLOP/s", "%", "$"];

function textOnLog(value, unit) {
  return TOLD_BY_TICKS.includes(unit) ? format(value, unit) : compact(value);
}

function unitOnLog(unit = "") {
  return TOLD_BY_TICKS.includes(unit) ? "" : unit;
}
