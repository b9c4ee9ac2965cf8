// FlashAttention's arithmetic on a matrix small enough to be read: Milakov and Gimelshein 2018, Dao
// et al. 2022. Keys and values come in tiles; of each query only a largest score `max`, a sum `sum`
// of exp(score − max) and an output are kept, and put right whenever a larger score comes.

/** Scores of queries against keys, −Infinity where a query must not see a key. */
export function scoresOf(queries, keys, isCausal) {
  const scale = 1 / Math.sqrt(keys[0].length);
  const first = keys.length - queries.length; // the queries are the last tokens
  return queries.map((query, row) => keys.map((key, column) =>
    isCausal && column > first + row ? -Infinity : scale * dot(query, key)));
}

/** What is known after none of the tiles, after the first, …: `[{ rows: [{ max, sum, output }] }]`. */
export function tileByTile(scores, values, tile) {
  const width = values[0].length;
  let rows = scores.map(() => ({ max: -Infinity, sum: 0, output: Array(width).fill(0) }));
  const states = [rows];
  for (let from = 0; from < values.length; from += tile) {
    const to = Math.min(values.length, from + tile);
    rows = rows.map((row, index) => takeTile(row, scores[index].slice(from, to), values.slice(from, to)));
    states.push(rows);
  }
  return states;
}

function takeTile({ max, sum, output }, scores, values) {
  const larger = Math.max(max, ...scores);
  if (larger === -Infinity) return { max, sum, output }; // nothing of this tile may be seen
  const shrink = Math.exp(max - larger); // of what was summed with a smaller largest score
  const weights = scores.map((score) => Math.exp(score - larger));
  return {
    max: larger,
    sum: shrink * sum + weights.reduce((total, weight) => total + weight, 0),
    output: output.map((each, column) => shrink * each + weights.reduce((total, weight, key) => total + weight * values[key][column], 0)),
  };
}

/** The output of a query: what was gathered, divided once, at the end. */
export function finish({ sum, output }) {
  return output.map((each) => (sum > 0 ? each / sum : 0));
}

/** The same with the whole row of scores at once. */
export function plainAttention(scores, values) {
  return scores.map((row) => {
    const max = Math.max(...row);
    const weights = row.map((score) => Math.exp(score - max));
    const sum = weights.reduce((total, weight) => total + weight, 0);
    return values[0].map((_, column) => weights.reduce((total, weight, key) => total + (weight / sum) * values[key][column], 0));
  });
}

function dot(one, other) {
  return one.reduce((total, each, index) => total + each * other[index], 0);
}
