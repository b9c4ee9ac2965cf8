// Weights of the model that this server has: which of them, and a piece of one.

import { askServer, isFolder } from "../common/places.js";
import { answerOf } from "./answers.js";

const [ROWS, COLUMNS] = [8, 256]; // of a piece, as octavo/page/tensors.py reads them
const SAMPLE = "sample";
const PATIENCE = 3000; // milliseconds: without an answer by then, there is the sample

/** Names of those that have room for a piece; none without a server, or a key that it takes. */
export async function listTensors() {
  if (isFolder) return [];
  const signal = AbortSignal.timeout(PATIENCE);
  const { tensors } = await askServer("octavo/tensors", { signal }).catch(() => ({ tensors: [] }));
  return tensors.filter(({ shape }) => shape === null || isLarge(shape)).map(({ name }) => name);
}

function isLarge(shape) {
  const columns = shape.at(-1);
  return columns >= COLUMNS && shape.reduce((product, each) => product * each, 1) >= ROWS * columns;
}

export function tensorControls(names) {
  const place = (id, label) => ({
    id, label, kind: "range", min: 0, max: 1, step: 0.01, value: 0, unit: "%", applies: ({ tensor }) => tensor !== SAMPLE,
  });
  return [
    { id: "tensor", label: "Weights", kind: "choice", value: SAMPLE, choices: [[SAMPLE, "a sample"], ...names.map((name) => [name, name])] },
    place("down", "Where, of its rows"),
    place("across", "Where, of its columns"),
  ];
}

/** The weights that are chosen: `{ source, columns, values }`, of the sample where the server has not
 * got them; `{ state, isWaiting }` as long as it is not known. */
export function chosenWeights(context) {
  const { values: { tensor = SAMPLE, down, across }, world: { sample } } = context;
  if (tensor === SAMPLE) return sample;
  const path = `octavo/tensors/${encodeURIComponent(tensor)}?down=${down}&across=${across}`;
  const found = answerOf("tensor", { path, waiting: "The server reads these weights.", failed: "The server did not read these weights" }, context);
  if (found.isWaiting) return found;
  found.weights ??= weightsOf(found, sample); // the same object each time
  return found.weights;
}

function weightsOf({ answer, state }, sample) {
  const problem = state ?? problemOf(answer);
  return problem ? { ...sample, source: `${sample.source}. ${problem}` } : pieceOf(answer);
}

function problemOf({ rows, columns, float32 }) {
  if (rows !== ROWS || columns !== COLUMNS) return `The tensor has no ${ROWS} × ${COLUMNS} weights`;
  return floats(float32).every(Number.isFinite) ? null : "Some weights of the tensor are no finite numbers";
}

/** Of little-endian bytes in base64. */
function floats(text) {
  return new Float32Array(Uint8Array.from(atob(text), (each) => each.charCodeAt(0)).buffer);
}

function pieceOf({ name, shape, format, is_quantized: isQuantized, row, column, rows, columns, float32 }) {
  const before = isQuantized ? `. The file has it in ${format} already: what you see is rounded a second time` : "";
  const place = `rows ${row}–${row + rows - 1}, columns ${column}–${column + columns - 1}`;
  return { source: `${name}, ${shape.join(" × ")} in ${format}: ${place}${before}`, columns, values: floats(float32) };
}
