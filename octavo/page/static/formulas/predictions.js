// A value, what it lies between nine times out of ten, and how that is known: `{ value, low, high,
// source }`, as octavo/cost/prediction.py has them.

const BY_TRUST = ["measured", "interpolated", "published", "roofline", "extrapolated"];

/** What is made of several parts is known as its worst part is. */
export function worst(sources) {
  return sources.reduce((one, other) =>
    BY_TRUST.indexOf(other) > BY_TRUST.indexOf(one) ? other : one, BY_TRUST[0]);
}

/** Give or take a share of the value: 0.1 is ten per cent. */
export function around(value, share, source) {
  return { value, low: value / (1 + share), high: value * (1 + share), source };
}

/** What a function makes of it that rises, or falls, all the way. */
export function mapped({ value, low, high, source }, of) {
  const ends = [of(low), of(high)];
  return { value: of(value), low: Math.min(...ends), high: Math.max(...ends), source };
}

export function times(prediction, factor) {
  return mapped(prediction, (value) => value * factor);
}

/** Of parts that may all be wrong in the same direction. */
export function sum(predictions) {
  const total = { value: 0, low: 0, high: 0, source: worst(predictions.map((each) => each.source)) };
  for (const each of predictions) {
    total.value += each.value;
    total.low += each.low;
    total.high += each.high;
  }
  return total;
}

/** One over another: least where little is above much. */
export function ratio(one, other) {
  return {
    value: one.value / other.value,
    low: one.low / other.high,
    high: one.high / other.low,
    source: worst([one.source, other.source]),
  };
}
