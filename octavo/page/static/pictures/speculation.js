// Speculative decoding: why the output has the model's own distribution, and when it is faster.

import { curves } from "../charts/curves.js";
import { lanes } from "../charts/lanes.js";
import { format } from "../common/numbers.js";
import {
  acceptance, batchedSpeedup, expectedTokens, speedup,
} from "../formulas/index.js";
import { planCommand } from "./picker.js";

const MOST_DRAFTED = 12;
const MOST_STREAMS = 512;
// What a model and a bad drafter may say of the next word after "The cat sat on the".
const WORDS = ["mat", "sofa", "floor", "roof", "table", "moon"];
const TARGET = [0.42, 0.2, 0.16, 0.12, 0.08, 0.02];
const STRANGER = [0.03, 0.06, 0.09, 0.12, 0.2, 0.5];

const PHASES = [
  "The model gives each word a probability p. That costs a step, in which it reads all of its weights.",
  "A drafter gives each word a probability q, for much less, and draws one from them: that is the draft token.",
  "The model verifies the draft token in its next step, and accepts it with probability min(1,\u00a0p/q): always where p ≥ q. A word that the drafter draws too often is rejected just often enough to correct that.",
  "Words that the drafter draws too seldom have something left: max(0, p − q).",
  "If the draft token is rejected, a word is drawn from just that, normalized to sum to 1: so every step brings a token.",
  "Accepted draft tokens and the words drawn instead add up to p, word for word: the answer is one that the model would have given.",
];

export const speculation = {
  id: "speculative-decoding",
  title: "Speculative decoding",
  sentences: [
    "A cheap drafter proposes some tokens, and the model verifies all of them in one step: a step reads the weights once, however many rows it computes.",
    "A draft token is accepted with probability min(1,\u00a0p/q), and a rejected one is replaced by a draw from max(0, p − q): the output has the model’s own distribution, however bad the drafter is.",
    "A draft token counts only if all before it are accepted, so k of them bring (1 − αᵏ⁺¹)/(1 − α) tokens and not kα + 1; and the more requests share a step, the less a further row is free.",
  ],
  readMore: "inference#speculative-decoding",
  needs: { model: true, hardware: true },
  controls: [
    { id: "phase", label: "One draft token, step by step", kind: "step", min: 1, max: PHASES.length, value: 3 },
    { id: "alike", label: "Likeness of drafter and model", kind: "range", min: 0, max: 1, step: 0.01, value: 0.5, unit: "%" },
    { id: "drafted", label: "Draft tokens k", kind: "range", min: 1, max: MOST_DRAFTED, step: 1, value: 4 },
    { id: "ratio", label: "Cost of a draft token, of a step", kind: "range", min: 0, max: 0.5, step: 0.01, value: 0.05, unit: "%" },
    { id: "streams", label: "Requests in a step", kind: "log-range", min: 1, max: MOST_STREAMS, value: 8 },
    { id: "length", label: "Tokens of each so far", kind: "log-range", min: 16, max: 131072, value: 300 },
  ],

  figures(context) {
    const { drafted, ratio, streams } = context.values;
    const { acceptance: alpha } = ruleOf(context);
    const tokens = expectedTokens(alpha, drafted);
    const share = digitsOf(alpha);
    const here = speedAt(context, drafted, streams);
    const { source } = here;
    const best = bestDraft(context);
    const even = breakEven(context);
    return [
      { label: "Acceptance probability α", value: alpha, unit: "%", formula: "Σ min(p, q)" },
      { label: "Tokens of a step", value: tokens, unit: "tokens", formula: `(1 − ${share}^${drafted + 1}) / (1 − ${share})` },
      { label: "Alone, if rows were free", value: speedup(tokens, drafted, ratio), unit: "×", formula: `${format(tokens)} / (1 + ${drafted} × ${ratio})` },
      { label: `With ${format(streams, "requests")} in a step`, ...here, unit: "×", formula: `${format(tokens)} × t(${streams}) / (t(${streams} × ${drafted + 1}) + ${drafted} × ${ratio} × t(${streams}))` },
      { label: "Best k, with as many requests", value: best.drafted, unit: "tokens", source, formula: best.drafted ? `${format(best.speed, "×")} as fast` : "no drafts are faster" },
      { label: "No longer faster from", value: even ?? `beyond ${MOST_STREAMS} requests`, unit: "requests", source },
    ];
  },

  command(context) {
    const { streams, length } = context.values;
    return planCommand(context, { isl: length, osl: 256, concurrency: streams, roofline: true });
  },

  draw(canvas, context) {
    const { phase } = context.values;
    canvas.place("phase", "p").textContent = PHASES[phase - 1];
    canvas.chart("rule", lanes, {
      title: "The next word after “The cat sat on the”",
      x: { label: "probability", unit: "%", min: 0, max: 0.6 },
      rows: WORDS.map((word, token) => ({ label: word, blocks: blocksOf(ruleOf(context), phase, token) })),
    });
    canvas.chart("tokens", curves, tokensChart(context));
    canvas.chart("speed", curves, speedChart(context));
  },
};

// -- one draft token ---------------------------------------------------------------------------------

function ruleOf({ values: { alike } }) {
  const q = TARGET.map((each, token) => alike * each + (1 - alike) * STRANGER[token]);
  return { p: TARGET, q, ...acceptance(TARGET, q) };
}

/** Of one word, in one phase. */
function blocksOf({ p, q, rest, acceptance: alpha }, phase, token) {
  const [model, drafter, kept] = [p[token], q[token], Math.min(p[token], q[token])];
  const block = (from, to, label, colour, more = {}) => ({ from, to, label, colour, text: percent(to - from), ...more });
  const phases = [
    [block(0, model, "p, of the model", 1)],
    [block(0, drafter, "q, of the drafter", 3)],
    [block(0, kept, "accepted: min(p, q)", 1), block(kept, drafter, "rejected: q − p", 2)],
    [block(0, kept, "accepted: min(p, q)", 1, { isFaint: true }), block(kept, model, "left: max(0, p − q)", 6)],
    [block(0, rest[token], "drawn if it is rejected", 6)],
    [block(0, kept, "accepted: min(p, q)", 1), block(kept, kept + (1 - alpha) * rest[token], "drawn instead: (1 − α) × rest", 6)],
  ];
  return phases[phase - 1].filter(({ from, to }) => to - from > 1e-9);
}

const percent = (share) => format(share, "%");
const digitsOf = (share) => share.toFixed(2);

// -- many draft tokens ------------------------------------------------------------------------------

function tokensChart(context) {
  const { acceptance: alpha } = ruleOf(context);
  const counts = Array.from({ length: MOST_DRAFTED + 1 }, (_, count) => count);
  return {
    title: `Tokens of a step, where ${percent(alpha)} of draft tokens are accepted`,
    x: { label: "draft tokens k", min: 0, max: MOST_DRAFTED },
    y: { label: "tokens of a step", min: 0 },
    layers: [
      { kind: "dashed", label: "kα + 1: wrong, as if acceptances were independent", colour: 2, points: counts.map((count) => [count, count * alpha + 1]) },
      { kind: "line", label: "(1 − αᵏ⁺¹) / (1 − α)", colour: 1, points: counts.map((count) => [count, expectedTokens(alpha, count)]) },
    ],
    marks: [{ x: context.values.drafted, label: `k = ${context.values.drafted}` }],
    height: 220,
  };
}

function speedChart(context) {
  const { drafted, streams } = context.values;
  const line = (count, colour, kind) => ({
    kind, colour, label: `k = ${count}`,
    points: batches().map((batch) => [batch, speedAt(context, count, batch).value]),
  });
  const others = [1, 8].filter((count) => count !== drafted);
  const ends = batches().map((batch) => [batch, speedAt(context, drafted, batch)]);
  const band = { kind: "band", colour: 1, label: "likely between", points: ends.map(([batch, { low, high }]) => [batch, low, high]) };
  return {
    title: "How many times as fast, by how many requests share a step",
    x: { label: "requests in a step", scale: "log", min: 1, max: MOST_STREAMS },
    y: { label: "times as fast", unit: "×", min: 0 },
    layers: [band, ...others.map((count, index) => line(count, [6, 3][index], "dashed")), line(drafted, 1, "line")],
    marks: [{ x: streams, label: format(streams, "requests") }, { y: 1, label: "no gain", isLeft: true }],
  };
}

/** The speedup where all requests draft so many tokens, with its bounds by the times of steps. */
function speedAt(context, drafted, batch) {
  const { values: { ratio, length }, deployment } = context;
  const tokens = expectedTokens(ruleOf(context).acceptance, drafted);
  const step = (rows) => deployment.stepTotal([[length - 1, rows, 1, rows - 1, batch]]);
  const [plain, verifying] = [step(1), step(drafted + 1)];
  const [value, ...ends] = ["value", "low", "high"].map((end) =>
    batchedSpeedup(tokens, drafted, batch, (_, rows) => (rows === 1 ? plain : verifying)[end], () => ratio * plain[end]));
  return { value, low: Math.min(value, ...ends), high: Math.max(value, ...ends), source: verifying.source };
}

function bestDraft(context) {
  const { streams } = context.values;
  let best = { drafted: 0, speed: 1 };
  for (let drafted = 1; drafted <= MOST_DRAFTED; drafted += 1) {
    const speed = speedAt(context, drafted, streams).value;
    if (speed > best.speed) best = { drafted, speed };
  }
  return best;
}

/** The least batch at which speculative decoding is no faster; null where it always is. */
function breakEven(context) {
  const pays = (batch) => speedAt(context, context.values.drafted, batch).value > 1;
  const first = batches().findIndex((batch) => !pays(batch));
  if (first < 1) return first === 0 ? 1 : null;
  let [low, high] = [batches()[first - 1], batches()[first]];
  while (high - low > 1) {
    const middle = Math.floor((low + high) / 2);
    [low, high] = pays(middle) ? [middle, high] : [low, middle];
  }
  return high;
}

/** 1, 2, 3, 4, 6, 8, 12, … */
function batches() {
  const powers = Array.from({ length: 9 }, (_, power) => 2 ** power);
  return [1, ...powers.slice(1).flatMap((power) => [power, power * 1.5]), MOST_STREAMS];
}
