// A run of several ranks (octavo/page/layout_traces.py) as blocks in time: what each stage or rank does
// when, and when it waits. No DOM.

const PROMPTS = { label: "step with prompts", colour: 1 };
const ANSWERS = { label: "step of answers alone", colour: 2 };
const BUBBLE = { label: "waits (bubble)", colour: 5, isFaint: true };
const EXCHANGE = { label: "exchanges results", colour: 6 };
const WAITS = { label: "waits for the busiest rank", colour: 5, isFaint: true };

/** The rows of one chart, from one moment to another: `[{ label, blocks }]`. */
export function rankRows(run, from, to) {
  const rows = run.kind === "pipeline" ? stageRows(run) : sameRows(run);
  return rows.map(({ label, blocks }) => ({ label, blocks: within(blocks, from, to) }));
}

/** Stages compute different steps at the same time; in between they wait. */
function stageRows({ ranks, steps }) {
  return Array.from({ length: ranks }, (_, stage) => {
    const blocks = [];
    let free = 0;
    steps.forEach(([, , prompts, , stages], number) => {
      const [begun, ended] = stages[stage];
      if (begun > free) blocks.push({ from: free, to: begun, ...BUBBLE });
      blocks.push(block(begun, ended, number, prompts));
      free = ended;
    });
    return { label: `stage ${stage + 1}`, blocks };
  });
}

/** Ranks compute the same step together, and exchange results; of experts, the busiest has most to do. */
function sameRows({ ranks, steps, kind }) {
  return Array.from({ length: ranks }, (_, rank) => {
    const blocks = [];
    steps.forEach(([begun, ended, prompts, , [exchange, experts = 0, loads = []]], number) => {
      const most = Math.max(...loads);
      const waits = kind === "experts" && most > 0 ? experts * (1 - loads[rank] / most) : 0;
      const computed = ended - exchange - waits;
      blocks.push(block(begun, computed, number, prompts));
      if (waits > 0) blocks.push({ from: computed, to: computed + waits, ...WAITS });
      if (exchange > 0) blocks.push({ from: ended - exchange, to: ended, ...EXCHANGE });
    });
    return { label: `rank ${rank + 1}`, blocks };
  });
}

function block(from, to, number, prompts) {
  return { from, to, text: String(number + 1), ...(prompts > 0 ? PROMPTS : ANSWERS) };
}

function within(blocks, from, to) {
  return blocks
    .filter((each) => each.to > from && each.from < to)
    .map((each) => ({ ...each, from: Math.max(each.from, from), to: Math.min(each.to, to) }));
}

/** Uses of experts on each rank over time, as stairs, to the mean of all ranks: 1 is even. */
export function loadSteps({ ranks, steps }, from, to) {
  const shown = steps.filter(([begun, ended]) => ended > from && begun < to);
  return Array.from({ length: ranks }, (_, rank) =>
    shown.flatMap(([begun, ended, , , [, , loads]]) => {
      const mean = loads.reduce((sum, each) => sum + each, 0) / ranks;
      const share = loads[rank] / mean;
      return [[Math.max(begun, from), share], [Math.min(ended, to), share]];
    }));
}

/** Shares of the time of all ranks, of a whole run: `{ idle, exchange }`; and the mean of the busiest
 * rank's load to that of all ranks, by uses. */
export function sharesOf({ ranks, steps, kind, seconds }) {
  if (kind === "pipeline") {
    const busy = steps.reduce((sum, [, , , , stages]) => sum + stages.reduce((all, [begun, ended]) => all + ended - begun, 0), 0);
    return { idle: 1 - busy / (ranks * seconds), exchange: null, busiest: null };
  }
  const exchange = steps.reduce((sum, [, , , , [each]]) => sum + each, 0) / seconds;
  if (kind === "tensor") return { idle: null, exchange, busiest: null };
  let [uses, most, waits] = [0, 0, 0];
  for (const [, , , , [, experts, loads]] of steps) {
    const total = loads.reduce((sum, each) => sum + each, 0);
    const busiest = Math.max(...loads);
    uses += total;
    most += busiest;
    waits += experts * (1 - total / ranks / busiest);
  }
  return { idle: waits / seconds, exchange, busiest: (most * ranks) / uses };
}
