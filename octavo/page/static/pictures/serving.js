// A server and its load, simulated: what waits, how long it takes, and where it breaks down.

import { curves } from "../charts/curves.js";
import { format } from "../common/numbers.js";
import { isFolder } from "../common/places.js";
import { distribution, goodput, knee, quantile } from "./in_time.js";
import { octavoCommand } from "./picker.js";
import { BOUNDS, CHOICES, RECORDED, SHARES, USUAL, fromText, runsOf, settingsOf, toText } from "./serving_runs.js";

const WORKLOAD = { "random-prefix-len": 512, "random-input-len": 512, "random-output-len": 128, "random-length-cv": 0.5 };
const ascending = (choices) => [...choices].sort((a, b) => a - b);
/** Any number where a server simulates it; else one of those that were recorded. */
function number(id, label, unit) {
  const [min, max] = BOUNDS[id];
  const range = { kind: max < 10 ? "range" : "log-range", min, max, step: 1 };
  return { id, label, unit, value: CHOICES[id][0], ...(isFolder ? { kind: "range", choices: ascending(CHOICES[id]) } : range) };
}

export const serving = {
  id: "serving",
  title: "A server under load",
  sentences: [
    "Requests come in clusters and with pauses, so some wait long before the server is busy all the time; averages do not show that, distributions do.",
    "Up to some rate nearly all requests are within their limits; beyond it the queue only grows, tokens a second stay the same, and goodput, the rate of answers in time, falls: that is the knee.",
    "More slots, more replicas, a cached prefix or other chunks move the knee, each for a price: try what a setting does to TTFT, to the gaps between tokens, and to the KV cache.",
  ],
  readMore: "inference#continuous-batching",
  needs: isFolder ? { file: RECORDED } : { file: RECORDED, model: true, hardware: true, noDeployment: true },
  controls: [
    { id: "share", label: "Load", kind: "range", choices: SHARES, value: 1, unit: "× one replica" },
    number("replicas", "Replicas"),
    number("max_num_seqs", "Slots of a batch", "requests"),
    number("step_tokens", "Tokens of a step", "tokens"),
    { id: "batching", label: "Batches", kind: "choice", choices: [["continuous", "continuous"], ["static", "static: those of one first step"]], value: "continuous" },
    { id: "ttft", label: "First token within", kind: "log-range", min: 0.01, max: 30, value: 0.5, unit: "s" },
    { id: "tpot", label: "Each further token within", kind: "log-range", min: 0.001, max: 1, value: 0.05, unit: "s" },
    { id: "prefix_caching", label: "Cache the prefix that all share", kind: "toggle", value: true },
    { id: "kept", label: "Keep these settings", kind: "kept", value: USUAL, keep: toText, words: keptWords },
    { id: "beside", label: "Show the kept settings beside", kind: "toggle", value: true },
  ],

  figures(context) {
    const { values } = context;
    const { runs, usual_rate: usual, made, state } = runsOf("these", settingsOf(context, values), context);
    if (!runs) return [{ label: "Simulation", value: "–", source: state }];
    const run = runAt(runs, values.share);
    const [first, next] = [0, 1].map((column) => run.requests.map((each) => each[column]));
    const good = goodput(run, values);
    const best = knee(runs, values);
    const source = `${state ? "recorded" : "simulated"} by octavo ${made.version}, ${made.date}`;
    const slowest = (all) => `95th percentile: ${format(quantile(all, 0.95), "s")}`;
    return [
      { label: "Arrival rate", value: run.rate, unit: "requests/s", source, formula: `${values.share} × ${format(usual)}, what one replica answers with the usual settings` },
      { label: "Time to the first token, median", value: quantile(first, 0.5), unit: "s", source, formula: slowest(first) },
      { label: "Time of each further token, median", value: quantile(next, 0.5), unit: "s", source, formula: slowest(next) },
      { label: "Within both limits", value: good.share, unit: "%", source, formula: `${good.good} of ${run.requests.length} requests` },
      { label: "Goodput", value: good.rate, unit: "requests/s", source, formula: `${format(good.share, "%")} of ${format(run.rate, "requests/s")}` },
      { label: "Knee: 90% are in time up to", value: best?.rate ?? "no rate that was tried", unit: "requests/s", source },
      { label: "Prompt tokens from the cache", value: run.prefix_hit_rate ?? 0, unit: "%", source, formula: `${run.num_preemptions} preemptions` },
    ];
  },

  command(context) {
    const settings = settingsOf(context, context.values);
    const { runs, settings: simulated = settings } = runsOf("these", settings, context);
    const run = runs && runAt(runs, context.values.share);
    const { values, model = { name: simulated.model ?? "llama-3.1-8b" } } = context;
    const picked = { precision: "published", kv: "auto", hardware: simulated.hardware ?? "h100-sxm", ...values };
    return octavoCommand("simulate", { values: picked, model, world: context.world }, {
      count: values.replicas, tp: 1, replicas: values.replicas, ...WORKLOAD,
      "num-prompts": run?.num_requests, "request-rate": run?.rate,
      "max-num-seqs": values.max_num_seqs, "max-num-batched-tokens": values.step_tokens, batching: values.batching,
      "no-enable-prefix-caching": !values.prefix_caching,
      goodput: `ttft:${Number((1e3 * values.ttft).toPrecision(3))} tpot:${Number((1e3 * values.tpot).toPrecision(3))}`,
    });
  },

  draw(canvas, context) {
    const { values } = context;
    const found = runsOf("these", settingsOf(context, values), context);
    const kept = values.beside ? runsOf("kept", settingsOf(context, fromText(values.kept)), context) : found;
    const said = canvas.place("phase", "p");
    said.setAttribute("role", "status");
    said.textContent = [found.runs && told(found, context), found.state ?? kept.state].filter(Boolean).join(" ");
    const all = [{ name: "these settings", colour: 1, ...found }, { name: "kept settings", colour: 2, isDashed: true, ...(kept.runs === found.runs ? {} : kept) }]
      .filter(({ runs }) => runs);
    if (all.length === 0) return; // charts stay as they are, or are not there yet
    canvas.chart("goodput", curves, goodputChart(all, values));
    canvas.chart("first-by-rate", curves, ratesChart(all, values, "Time to the first token, by the rate", 0, values.ttft));
    canvas.chart("next-by-rate", curves, ratesChart(all, values, "Time of each further token, by the rate", 1, values.tpot));
    canvas.chart("load", curves, seriesChart(all, values, "Requests at the server", "requests", [["waiting", 2, 5], ["running", 1, 1]]));
    canvas.chart("pool", curves, seriesChart(all, values, "KV cache in use", "%", [["held", 3, 3]]));
    canvas.chart("first", curves, latencyChart(all, values, "Time to the first token", 0, values.ttft));
    canvas.chart("next", curves, latencyChart(all, values, "Time of each further token, mean of a request", 1, values.tpot));
  },
};

function keptWords(text) {
  const kept = fromText(text);
  if (kept === null) return null;
  const prefix = kept.prefix_caching ? "cached" : "uncached";
  return `Kept: ${kept.batching} batches, ${prefix} prefix, ${format(kept.step_tokens, "tokens")} a step, ${kept.max_num_seqs} slots, ${kept.replicas} ${kept.replicas === 1 ? "replica" : "replicas"}`;
}

function told({ settings, made, isRecorded }, context) {
  const [model, hardware] = isRecorded ? [settings.model, settings.hardware] : [context.model.name, context.device.name];
  const where = isRecorded ? `Recorded ${made.date} with octavo ${made.version}` : "Simulated by this server";
  return `${where}: octavo’s own scheduler in virtual time, ${model} on ${hardware}. `
    + "At each rate 100 requests or more are sent; shares and times are of their second half, as the server has filled by then, and precise to some percent.";
}

function runAt(runs, share) {
  return runs.find((run) => run.share === share);
}

function goodputChart(all, limits) {
  const layers = all.map(({ runs, name, colour, isDashed }) => ({
    kind: isDashed ? "dashed" : "line", label: `in time, ${name}`, colour,
    points: runs.map((run) => [run.rate, goodput(run, limits).rate]),
  }));
  const highest = Math.max(1e-9, ...layers.flatMap(({ points }) => points.map(([, rate]) => rate)));
  const rates = all[0]?.runs.map(({ rate }) => rate) ?? [];
  // Rates at which no request is in time any more are all alike, but for the one that is shown.
  const last = rates.findLastIndex((rate, index) => layers.some(({ points }) => points[index][1] > 0) || SHARES[index] === limits.share);
  const best = all[0] && knee(all[0].runs, limits);
  const marks = all[0] ? [{ x: runAt(all[0].runs, limits.share).rate, label: "shown below" }] : [];
  if (best) marks.push({ x: best.rate, label: `knee: ${format(best.rate, "requests/s")}` });
  return {
    title: "Goodput: requests answered within both limits",
    x: { label: "arrival rate (requests/s)", min: 0, max: rates[Math.min(rates.length - 1, last + 1)] },
    y: { label: "requests/s", unit: "requests/s", min: 0, max: highest * 1.25 },
    layers: [{ kind: "dashed", label: "all arrivals", colour: 7, points: rates.map((rate) => [rate, rate]) }, ...layers],
    marks,
  };
}

/** The median and the 95th percentile: of some hundred requests, no more can be told. */
function ratesChart(all, { share }, title, column, limit) {
  return {
    title,
    x: { label: "arrival rate (requests/s)", min: 0 },
    y: { label: "time", unit: "s", scale: "log" },
    layers: all.flatMap(({ runs, name, isDashed }) => [["median", 0.5, 1], ["95th percentile", 0.95, 2]].map(([label, part, colour]) => ({
      kind: isDashed ? "dashed" : "line", label: `${label}, ${name}`, colour,
      points: within(runs, column, part),
    }))),
    marks: [
      ...all.slice(0, 1).map(({ runs }) => ({ x: runAt(runs, share).rate, label: "shown below" })),
      { y: limit, label: `limit ${format(limit, "s")}`, isLimit: true },
    ],
    height: 220,
  };
}

const sorted = new WeakMap(); // of runs: what was sorted once need not be for each frame

/** `[rate, what a share of the requests came within]`. */
function within(runs, column, part) {
  if (!sorted.has(runs)) sorted.set(runs, new Map());
  const [known, key] = [sorted.get(runs), `${column} ${part}`];
  if (!known.has(key)) known.set(key, runs.map((run) => [run.rate, quantile(run.requests.map((each) => each[column]), part)]));
  return known.get(key);
}

/** Columns of the series over time: `[label, column, colour]`. */
function seriesChart(all, { share }, title, unit, columns) {
  return {
    title,
    x: { label: "time", unit: "s", min: 0 },
    y: { label: unit === "%" ? "share of the pool" : unit, unit, min: 0 },
    layers: all.flatMap(({ runs, name, isDashed }) => columns.map(([label, column, colour]) => ({
      kind: isDashed ? "dashed" : "line", label: `${label}, ${name}`, colour,
      points: runAt(runs, share).series.map((point) => [point[0], point[column]]),
    }))),
    height: 200,
  };
}

function latencyChart(all, { share }, title, column, limit) {
  return {
    title,
    x: { label: "time", unit: "s", scale: "log" },
    y: { label: "share of the requests", unit: "%", min: 0, max: 1 },
    layers: all.map(({ runs, name, colour, isDashed }) => ({
      kind: isDashed ? "dashed" : "line", label: name, colour,
      points: distribution(runAt(runs, share).requests.map((each) => each[column])),
    })),
    marks: [{ x: limit, label: `limit ${format(limit, "s")}`, isLimit: true }],
    height: 200,
  };
}
