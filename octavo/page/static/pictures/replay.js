// A run of octavo's scheduler (octavo/page/batching_traces.py) as blocks in time: what each request
// did when, and which request had which slot of the batch. No DOM.

const WAITING = { label: "waits", colour: 7, isFaint: true };
// The colours of prompts and answers are those of the dashboard (engine/charts.js).
const PROMPT = { label: "prompt", colour: 1 };
const ANSWER = { label: "answer", colour: 2 };
const EMPTY = { label: "slot is empty", colour: 5, isFaint: true };

/** Of each request, as blocks: it waits, its prompt is computed, it is answered; in between it may
 * have been preempted, and waits again. */
export function requestRows({ requests }, { steps }) {
  const rows = requests.map(([arrival]) => ({ at: arrival, blocks: [] }));
  const add = (number, [begun, ended], kind) => {
    const row = rows[number];
    if (begun > row.at) extend(row.blocks, row.at, begun, WAITING);
    extend(row.blocks, Math.max(begun, row.at), ended, kind);
    row.at = ended;
  };
  for (const [begun, ended, prompts, decoding] of steps) {
    for (const [number] of prompts) add(number, [begun, ended], PROMPT);
    for (const number of decoding) add(number, [begun, ended], ANSWER);
  }
  return rows.map(({ blocks }) => blocks);
}

/** The blocks of each slot of the batch: its requests, and where it is empty. A request takes the first
 * empty slot, and keeps it until it has ended. */
export function slotRows({ slots }, { steps }) {
  const rows = Array.from({ length: slots }, () => []);
  let holders = Array(slots).fill(null);
  let last = 0;
  for (const [begun, ended, prompts, decoding] of steps) {
    const now = [...prompts.map(([number]) => number), ...decoding];
    holders = seated(holders, now);
    const isPrompt = new Set(prompts.map(([number]) => number));
    holders.forEach((number, slot) => {
      if (begun > last) extend(rows[slot], last, begun, EMPTY);
      const kind = number === null ? EMPTY : isPrompt.has(number) ? PROMPT : ANSWER;
      extend(rows[slot], begun, ended, kind, number);
    });
    last = ended;
  }
  return rows;
}

/** Who sits where, once only those are there that are in `now`. */
function seated(holders, now) {
  const kept = holders.map((number) => (now.includes(number) ? number : null));
  for (const number of now.filter((each) => !kept.includes(each))) kept[kept.indexOf(null)] = number;
  return kept;
}

/** Requests in the batch over time, as stairs. */
export function batchSizes({ steps }) {
  const points = [[0, 0]];
  for (const [begun, ended, prompts, decoding] of steps) {
    points.push([begun, prompts.length + decoding.length], [ended, 0]);
  }
  return points.filter(([at], index) => points[index + 1]?.[0] !== at);
}

/**
 * What comes of a run: its length, mean time to the first token, seconds of slots that were used,
 * of all that there were, and of those that were empty while requests waited.
 */
export function outcome({ slots }, { seconds, ttft, steps }) {
  let [used, wasted] = [0, 0];
  for (const [begun, ended, prompts, decoding, waiting] of steps) {
    const size = prompts.length + decoding.length;
    used += size * (ended - begun);
    wasted += Math.min(waiting, slots - size) * (ended - begun);
  }
  const begin = steps[0][0];
  return { seconds, ttft: mean(ttft), slowest: Math.max(...ttft), used, wasted, all: slots * (seconds - begin) };
}

/** Only what has happened until then. */
export function until(blocks, moment) {
  return blocks.filter(({ from }) => from < moment).map((block) => ({ ...block, to: Math.min(block.to, moment) }));
}

/** One block more, or the last one longer where it goes on as it was. */
function extend(blocks, from, to, kind, number = null) {
  const last = blocks.at(-1);
  if (last && last.label === kind.label && last.number === number && last.to >= from - 1e-9) last.to = to;
  else blocks.push({ from, to, number, ...kind });
}

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}
