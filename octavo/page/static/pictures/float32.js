// Arithmetic as octavo's quantizers do it: in float32, and rounded to floats of fewer bits.

const float = new Float32Array(1);
const word = new Uint32Array(float.buffer);

/** The power of two in a float32 that is not 0 and not subnormal. */
export function exponentOf(value) {
  float[0] = value;
  return ((word[0] >>> 23) & 255) - 127;
}

/** To the nearest integer, and halves to the even one. */
export function roundEven(value) {
  const near = Math.round(value);
  return Math.abs(value % 1) === 0.5 && near % 2 !== 0 ? near - 1 : near;
}

export function clamp(value, low, high) {
  return Math.min(high, Math.max(low, value));
}

/** 0 where it is not finite. */
export function quotient(x, y) {
  const value = Math.fround(x / y);
  return Number.isFinite(value) ? value : 0;
}

/** A float of so many bits for the fraction; `least` is the exponent of the smallest normal one. */
export class SmallFloat {
  constructor(exponentBits, fractionBits, least, largest) {
    this.fractionBits = fractionBits;
    this.least = least;
    this.largest = largest;
    this.sign = 2 ** (exponentBits + fractionBits);
  }

  /** The nearest, of halves the even one; what is too large becomes the largest. */
  nearest(value) {
    const step = this.#step(value);
    return clamp(roundEven(value / step) * step, -this.largest, this.largest);
  }

  /** The code of a value that is one of these. */
  codeOf(value) {
    const step = this.#step(value);
    const above = Math.round(Math.log2(step)) + this.fractionBits - this.least;
    return (value < 0 || Object.is(value, -0) ? this.sign : 0) + above * 2 ** this.fractionBits + Math.abs(value) / step;
  }

  /** All values there are, from the lowest to the highest. */
  values() {
    const found = [];
    for (let value = 0; value <= this.largest; value += this.#step(value)) found.push(value);
    return [...found.slice(1).map((value) => -value).reverse(), ...found];
  }

  #step(value) {
    return 2 ** (Math.max(exponentOf(value), this.least) - this.fractionBits);
  }
}

// OCP Microscaling Formats 1.0 and 8-bit Floating Point 1.0; IEEE 754.
export const E2M1 = new SmallFloat(2, 1, 0, 6);
export const E4M3 = new SmallFloat(4, 3, -6, 448);
const FLOAT16 = new SmallFloat(5, 10, -14, 65504);

/** Rounded to float16. */
export function half(value) {
  return FLOAT16.nearest(value);
}
