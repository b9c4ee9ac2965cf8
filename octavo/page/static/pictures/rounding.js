// Weights as the numbers of few bits that files hold. What each type here makes of rows, octavo's
// quantizers make of them too, code for code: tests/page/test_quantization.py asks both.

import { fitAffine } from "./affine_search.js";
import { clamp, E2M1, E4M3, exponentOf, half, quotient, roundEven } from "./float32.js";

const { fround } = Math;
const LEAST_SCALE = 2 ** -24; // of float16, and of scales that must not be 0
const SUPER_BLOCK = 256;

/**
 * `{ about, bits(columns), formula, levels, width, round(values, columns) }` by name. `round` of a
 * Float32Array of whole rows returns `{ width, codes, scales, offsets, values }`, where
 *
 *   value = scale × level + offset
 *
 * for `width` neighbours that share scale and offset (of a type, Infinity is a whole row); a code is a level, but of tables and of
 * integers with a zero the bits that are stored. `levels` are all that there are.
 */
export const TYPES = {
  Q8_0: { about: "as in GGUF files: 8 bits, a float16 scale for 32", bits: () => 8 + 16 / 32, formula: "8 + 16 / 32", levels: integers(-127, 127), ...inGroups(32, q80) },
  fp8: { about: "FP8 E4M3, a float32 scale for a row", bits: (columns) => 8 + 32 / columns, formula: "8 + 32 / columns", levels: E4M3.values(), width: Infinity, round: (values, columns) => inGroups(columns, fp8).round(values) },
  Q4_K: { about: "as in GGUF files: 4 bits, scales and offsets of 6 bits for 32, two float16 for 256", bits: () => 4.5, formula: "4 + (6 + 6) / 32 + 2 × 16 / 256", levels: integers(0, 15), width: 32, round: q4k },
  Q4_0: { about: "as in GGUF files: 4 bits, a float16 scale for 32", bits: () => 4 + 16 / 32, formula: "4 + 16 / 32", levels: integers(-8, 7), ...inGroups(32, q40) },
  "int4-g32-asym": { about: "4 bits, a float16 scale and a zero for 32, as of AWQ", bits: () => 4 + 20 / 32, formula: "4 + (16 + 4) / 32", levels: integers(0, 15), ...inGroups(32, withZero) },
  "int4-g64": { about: "4 bits, a float16 scale for 64, as of GPTQ", bits: () => 4 + 16 / 64, formula: "4 + 16 / 64", levels: integers(-8, 7), ...inGroups(64, symmetric) },
  "int4-g128": { about: "4 bits, a float16 scale for 128", bits: () => 4 + 16 / 128, formula: "4 + 16 / 128", levels: integers(-8, 7), ...inGroups(128, symmetric) },
  MXFP4: { about: "FP4 E2M1, a power of two for 32", bits: () => 4 + 8 / 32, formula: "4 + 8 / 32", levels: E2M1.values(), ...inGroups(32, mxfp4) },
  NVFP4: { about: "FP4 E2M1, an FP8 scale for 16, a float32 for all", bits: () => 4 + 8 / 16, formula: "4 + 8 / 16", levels: E2M1.values(), width: 16, round: nvfp4, looksAtAll: true },
};

/** What `round` makes of `values`, if it has made `before` of all their rows but one: of that one
 * alone, unless the type looks at all of them. */
export function roundOneRow(type, before, values, columns, row) {
  if (type.looksAtAll) return type.round(values, columns);
  const made = type.round(values.subarray(row * columns, (row + 1) * columns), columns);
  const put = (name) => {
    const all = before[name].slice();
    made[name].forEach((each, index) => (all[row * made[name].length + index] = each));
    return all;
  };
  return { width: made.width, codes: put("codes"), scales: put("scales"), offsets: put("offsets"), values: put("values") };
}

/** The root of the mean square of what is lost, and of what there was. */
export function rootMeanSquares(values, rounded) {
  const root = (of) => Math.sqrt(of.reduce((sum, each) => sum + each * each, 0) / of.length);
  return { error: root(Array.from(values, (each, index) => rounded[index] - each)), value: root(Array.from(values)) };
}

function integers(low, high) {
  return Array.from({ length: high - low + 1 }, (_, index) => low + index);
}

/** `{ width, round }`; `fit(group)` makes `{ scale, offset, codes, levels }` of each group. */
function inGroups(width, fit) {
  const round = (values) => {
    const found = { width, codes: [], scales: [], offsets: [], values: new Float32Array(values.length) };
    for (let start = 0; start < values.length; start += width) {
      const { scale, offset = 0, codes, levels = codes } = fit(values.subarray(start, start + width));
      found.codes.push(...codes);
      found.scales.push(scale);
      found.offsets.push(offset);
      levels.forEach((level, index) => (found.values[start + index] = scale * level + offset));
    }
    return found;
  };
  return { width, round };
}

// -- integers ----------------------------------------------------------------------------------

/** The extreme value is put on the level -8, of which there is no opposite. */
function q40(x) {
  const extreme = x.reduce((found, each) => (Math.abs(each) > Math.abs(found) ? each : found));
  const d = fround(extreme / -8);
  const inverse = quotient(1, d);
  return { scale: half(d), codes: Array.from(x, (each) => clamp(Math.floor(fround(fround(each * inverse) + 8.5)), 0, 15) - 8) };
}

/** Halves go away from zero. */
function q80(x) {
  const d = fround(largest(x) / 127);
  const inverse = quotient(1, d);
  return { scale: half(d), codes: Array.from(x, (each) => Math.sign(each) * Math.round(Math.abs(fround(each * inverse)))) };
}

/** The grid holds all values with half a step to spare at the lower end. */
function symmetric(x) {
  const scale = storedScale(largest(x) / 7.5);
  const codes = Array.from(x, (each) => clamp(roundEven(fround(fround(each / scale) + 8)), 0, 15));
  return { scale, codes, levels: codes.map((code) => code - 8) };
}

function withZero(x) {
  const [low, high] = [Math.min(...x, 0), Math.max(...x, 0)];
  const scale = storedScale(fround(high - low) / 15);
  const zero = clamp(roundEven(fround(-low / scale)), 0, 15);
  const codes = Array.from(x, (each) => clamp(roundEven(fround(fround(each / scale) + zero)), 0, 15));
  return { scale, offset: -scale * zero, codes };
}

function storedScale(scale) {
  return Math.max(LEAST_SCALE, half(fround(scale)));
}

function largest(x) {
  return x.reduce((found, each) => Math.max(found, Math.abs(each)), 0);
}

/** Super-blocks, whose sub-blocks are what shares a scale and an offset. */
function q4k(values) {
  const width = 32;
  const found = { width, codes: [], scales: [], offsets: [], values: new Float32Array(values.length) };
  for (let start = 0; start < values.length; start += SUPER_BLOCK) {
    const parts = Array.from({ length: SUPER_BLOCK / width }, (_, part) => values.subarray(start + part * width, start + (part + 1) * width));
    const { d, e, s, t, levels } = fitAffine(parts);
    levels.forEach((codes, part) => {
      const [scale, offset] = [d * s[part], -e * t[part]];
      found.scales.push(scale);
      found.offsets.push(offset);
      codes.forEach((code, index) => (found.values[start + part * width + index] = scale * code + offset));
      found.codes.push(...codes);
    });
  }
  return found;
}

// -- floats ------------------------------------------------------------------------------------

function fp8(x) {
  const scale = Math.max(LEAST_SCALE, fround(largest(x) / E4M3.largest));
  return asFloats(x, scale, E4M3);
}

/** The largest power of two is put on that of E2M1: what is between 6 and 8 of it becomes 6. */
function mxfp4(x) {
  const most = largest(x);
  const exponent = most === 0 ? -127 : clamp(exponentOf(most) - 2, -127, 127);
  return asFloats(x, 2 ** exponent, E2M1);
}

/** A float32 for all puts the largest scale of a group on the largest of FP8. */
function nvfp4(values) {
  const most = largest(values);
  const divisor = most === 0 ? 1 : fround((E2M1.largest * E4M3.largest) / most);
  return inGroups(16, (x) => {
    const stored = E4M3.nearest(fround(fround(largest(x) / E2M1.largest) * divisor));
    return asFloats(x, fround(stored / divisor), E2M1);
  }).round(values);
}

function asFloats(x, scale, type) {
  const levels = Array.from(x, (each) => type.nearest(scale === 0 ? 0 : fround(each / scale)));
  return { scale, codes: levels.map((level) => type.codeOf(level)), levels };
}
