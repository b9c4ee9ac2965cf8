// How to serve a model: the questions that decide it, each with the number that answers it.

import { element } from "../common/dom.js";
import { format } from "../common/numbers.js";
import { decisions } from "../formulas/index.js";
import { planCommand } from "./picker.js";

const ONE_DEVICE = { tp: 1 };
// By what octavo.planner.decisions asks: the question, what decides it, what follows from yes and no.
const QUESTIONS = {
  "one device": {
    ask: () => "Does one device hold it, with a fifth of the memory left for the KV cache?",
    because: ({ weightsBytes, share, usableBytes, fitting, length }) =>
      `${format(weightsBytes, "iB")} of weights leave ${format(share, "%")} of ${format(usableBytes, "iB")}: ${format(fitting)} requests of ${format(length)} tokens`,
    yes: "One device a replica, and more replicas for more requests: nothing is cheaper",
    no: "Fewer bits first, then more devices for each replica",
  },
  tensors: {
    ask: ({ tp }) => `Does a token come sooner with each matrix on ${2 * tp} devices?`,
    because: ({ work, lessWork, talk, moreTalk }) =>
      `reading and computing ${format(work, "s")} → ${format(lessWork, "s")}, communication ${format(talk, "s")} → ${format(moreTalk, "s")}`,
    yes: "More tp where the time between tokens matters; replicas where throughput does",
    no: "The present tensor parallelism is enough",
  },
  link: {
    ask: () => "Is the link between devices fast?",
    because: ({ bandwidth, kind }) => `${format(bandwidth, "B/s")} each way (${kind || "none"}); 100 GB/s divide the two`,
    yes: "Tensor parallelism (tp) is possible",
    no: "Pipeline parallelism for throughput, fewer bits for latency",
  },
  machine: {
    ask: () => "Does a replica stay within one machine?",
    because: ({ each, island }) => `${each} devices a replica, ${island} that have fast links to each other`,
    yes: "Tensor parallelism within it",
    no: "Pipeline parallelism across machines, tensor parallelism within",
  },
  memory: {
    ask: () => "Is a decoding step bound by memory?",
    because: ({ streams, intensity, name, ridge, bound, seconds }) =>
      `${format(streams)} requests under way: ${format(intensity)} operations a byte in ${name}, and ${format(ridge)} would balance; ${bound} takes most of ${format(seconds, "s")}`,
    yes: "Larger batches, fewer bits, or speculative decoding cost little",
    no: "Less work for each device helps: more devices, or a smaller model",
  },
  prompts: {
    ask: () => "Do prompts take most of the time?",
    because: ({ share, budget }) => `${format(share, "%")} of it, in steps of up to ${format(budget)} tokens`,
    yes: "Share prefixes, or compute prompts on separate devices (disaggregated prefill)",
    no: "Fewer tokens a step keep ITL low, more tokens a step lower TTFT",
  },
  cache: {
    ask: () => "Does the KV cache bound how many requests run at once?",
    because: ({ fitting, slots, length }) => `${format(fitting)} requests of ${format(length)} tokens fit, and there are ${format(slots)} slots`,
    yes: "A KV cache of 8 bits, or a larger share of the memory",
    no: "The slots (max_num_seqs) do",
  },
};

export const decisionTree = {
  id: "decision-tree",
  title: "Deployment decisions",
  sentences: [
    "A handful of questions decides how a model is served, and each has a number that answers it for this model, this hardware and this traffic.",
    "They come in the order in which they matter: what fits, the cost of communication between devices, what bounds a step, and what bounds how many requests run at once.",
    "Move a slider until an answer changes: the number on the way says how far you are from that.",
  ],
  readMore: "planning#formulas",
  needs: { model: true, hardware: true },
  controls: [
    { id: "tp", label: "Tensor parallel devices (tp)", kind: "range", choices: [1, 2, 4, 8, 16], value: 1 },
    { id: "replicas", label: "Replicas", kind: "range", choices: [1, 2, 4, 8, 16], value: 1 },
    { id: "input", label: "Tokens of a prompt", kind: "log-range", min: 16, max: 65536, value: 1000 },
    { id: "output", label: "Tokens of an answer", kind: "log-range", min: 2, max: 8192, value: 250 },
    { id: "rate", label: "Requests a second", kind: "log-range", min: 0.01, max: 1000, value: 2, unit: "requests/s" },
  ],

  layouts: ({ tp }) => [ONE_DEVICE, { tp: 2 * tp }],

  figures(context) {
    const { deployment, values: { input, output } } = context;
    const fitting = { label: "Requests that fit at once", value: deployment.maxConcurrency(input + output), unit: "requests", formula: `of ${input} + ${output} tokens` };
    if (!deployment.holds(input + output)) return [fitting];
    const { streams, ttft, tpot, isStable } = deployment.service(trafficOf(context));
    if (!isStable) return [fitting, { label: "Requests under way", value: "more and more", formula: "more requests come than are answered" }];
    return [
      fitting,
      { label: "Requests under way", ...streams, unit: "requests" },
      { label: "First token after", ...ttft, unit: "s" },
      { label: "Each further token after", ...tpot, unit: "s" },
    ];
  },

  command(context) {
    const { tp, replicas, input: isl, output: osl, rate } = context.values;
    return planCommand(context, { count: tp * replicas, tp, isl, osl, rate });
  },

  draw(canvas, context) {
    const { deployment, laidOut, values: { tp } } = context;
    const found = decisions(deployment, { one: laidOut(ONE_DEVICE), wider: laidOut({ tp: 2 * tp }) }, trafficOf(context));
    canvas.place("tree", "ol").replaceChildren(...found.map(questionElement));
  },
};

function trafficOf({ values: { input: inputLen, output: outputLen, rate } }) {
  return { inputLen, outputLen, rate };
}

/** A question, and both ways on from it: the one that is taken has its number. */
function questionElement({ id, answer, numbers }) {
  const { ask, because, yes, no } = QUESTIONS[id];
  const branch = (says, then, isTaken) => element(
    "div",
    { class: isTaken ? "branch is-taken" : "branch" },
    element("p", { class: "edge" }, element("b", {}, isTaken ? `${says}: ` : says), isTaken ? because(numbers) : null),
    element("p", { class: "then" }, then),
  );
  return element(
    "li",
    {},
    element("p", { class: "question" }, ask(numbers)),
    element("div", { class: "branches" }, branch("yes", yes, answer), branch("no", no, !answer)),
  );
}
