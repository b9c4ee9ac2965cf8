// What a token costs, by how soon each user has the next one.

import { curves } from "../charts/curves.js";
import { format } from "../common/numbers.js";
import { planCommand } from "./picker.js";

const LAYOUTS = [1, 2, 4, 8];
const LOADS = [0.02, 0.06, 0.15, 0.3, 0.45, 0.6, 0.75, 0.87, 0.97]; // of the highest rate
const REMEMBERED = 24;

export const costs = {
  id: "cost-and-throughput",
  title: "Cost and throughput",
  sentences: [
    "A device costs the same whether it answers one request or a hundred: the cost of a token is the price of an hour divided by the tokens of that hour.",
    "The more requests share a step, the cheaper each token is, and the longer each user waits for the next one: no setting gives both, and the upper right edge of the first chart is the best there is.",
    "Prompts take their part of each device’s time, and idle hours are paid for by the tokens of busy ones: a price without a load says nothing.",
  ],
  readMore: "inference#the-cost-of-a-token",
  needs: { model: true, hardware: true },
  controls: [
    { id: "tp", label: "Devices of a replica (tp)", kind: "range", choices: LAYOUTS, value: 1 },
    { id: "input", label: "Tokens of a prompt", kind: "log-range", min: 16, max: 16384, value: 1000 },
    { id: "output", label: "Tokens of an answer", kind: "log-range", min: 2, max: 4096, value: 250 },
    { id: "load", label: "Load, of the highest rate", kind: "range", min: 0.02, max: 0.97, step: 0.01, value: 0.6, unit: "%" },
  ],

  layouts: () => LAYOUTS.map((tp) => ({ tp })),

  figures(context) {
    const { deployment, values } = context;
    const most = highestRate(deployment, values);
    if (most === 0) return [{ label: "Requests that fit", value: 0, unit: "requests", formula: "none of this length: more devices, fewer bits, or a model for longer texts" }];
    const point = pointAt(deployment, values, most, values.load);
    const { service, rate, bill } = point;
    const tokens = rate * values.output;
    const range = ({ value, low, high, source }) => ({ value, low, high, source });
    const found = [
      { label: "Requests a second", value: rate, unit: "requests/s", source: service.tpot.source, formula: `${format(values.load, "%")} of ${format(most, "requests/s")}` },
      { label: "Tokens for each user", value: 1 / service.tpot.value, low: 1 / service.tpot.high, high: 1 / service.tpot.low, unit: "tokens/s", source: service.tpot.source, formula: `1 / ${format(service.tpot.value, "s")} with ${format(service.streams.value)} requests in a step` },
      { label: "Tokens of each device", value: tokens / deployment.numDevices, unit: "tokens/s", source: service.tpot.source, formula: `${format(rate)} × ${values.output} / ${deployment.numDevices}` },
      { label: "First token after", ...range(service.ttft), unit: "s" },
      { label: "First token, 99 of 100 within", ...range(service.within("ttft", 0.99)), unit: "s" },
    ];
    if (bill === null) return [...found, { label: "A million tokens", value: "no price is known" }];
    const { perMillionOutputTokens: each, perHour, joulesPerOutputToken: joules } = bill;
    found.push({ label: "A million tokens of answers", ...range(each), unit: "$", formula: `${format(perHour.value, "$")} an hour / ${format(tokens * 3600)} tokens an hour` });
    if (joules) found.push({ label: "Energy of a token", ...range(joules), unit: "J", formula: `${deployment.document.money.watts_text} × ${deployment.numDevices} / ${format(most * values.output)} tokens/s at full load` });
    return found;
  },

  command(context) {
    const { deployment, values } = context;
    const rate = Number((highestRate(deployment, values) * values.load).toPrecision(3));
    if (rate === 0) return null;
    return planCommand(context, { count: values.tp, tp: values.tp, isl: values.input, osl: values.output, rate });
  },

  draw(canvas, context) {
    const { deployment, laidOut, values } = context;
    const lines = LAYOUTS.map((tp, index) => ({ tp, colour: [1, 2, 3, 6][index], points: curveOf(laidOut({ tp }), values) }))
      .filter(({ points }) => points.length > 0);
    const own = lines.find(({ tp }) => tp === values.tp);
    const layer = ({ tp, colour, points }, of) => ({
      kind: tp === values.tp ? "line" : "dashed", colour, label: `${tp} ${tp === 1 ? "device" : "devices"}`,
      points: points.map((point) => [point.perUser, of(point)]),
    });
    const x = { label: "tokens for each user", unit: "tokens/s", min: 0 };
    const here = own ? nearest(own.points, values.load) : null;
    const marks = here ? [{ x: here.perUser, label: `load of ${format(values.load, "%")}` }] : [];
    canvas.chart("throughput", curves, {
      title: "Throughput of a device against speed for each user",
      x, y: { label: "tokens/s of a device", unit: "tokens/s", min: 0 }, marks,
      layers: lines.map((line) => layer(line, (point) => point.perDevice)),
    });
    if (!deployment.document.money.fixed_usd_per_hour) return;
    const band = own ? [{ kind: "band", colour: 1, label: "likely between", points: own.points.map(({ perUser, dollars }) => [perUser, dollars.low, dollars.high]) }] : [];
    canvas.chart("dollars", curves, {
      title: "What a million tokens of answers cost",
      x, y: { label: "US dollars", unit: "$", scale: "log" }, marks,
      layers: [...band, ...lines.map((line) => layer(line, (point) => point.dollars.value))],
    });
  },
};

/** Points from a low load to nearly the highest rate; none where the model cannot be laid out so. */
function curveOf(deployment, values) {
  const most = deployment === null ? 0 : highestRate(deployment, values);
  if (most === 0) return [];
  return memoized(`curve ${keyOf(deployment, values)}`, () =>
    LOADS.map((load) => {
      const { rate, service, bill } = pointAt(deployment, values, most, load);
      const perDevice = (rate * values.output) / deployment.numDevices;
      return { load, perUser: 1 / service.middle.tpot, perDevice, dollars: bill?.perMillionOutputTokens };
    }));
}

/** At a load, of `most` requests a second: as `octavo plan --rate` has it. */
function pointAt(deployment, { input: inputLen, output: outputLen }, most, load) {
  const rate = most * load;
  const service = deployment.service({ inputLen, outputLen, rate });
  const streams = Math.ceil(service.middle.streams / deployment.numGroups);
  const step = deployment.stepTotal([[inputLen + Math.floor(outputLen / 2) - 1, 1, 1, 0, streams]]);
  const requestsPerSecond = { // the longer a step takes, the fewer there are
    value: most, low: (most * step.value) / step.high, high: (most * step.value) / step.low, source: step.source,
  };
  const { prefillShare } = service;
  const bill = deployment.money({ requestsPerSecond, inputLen, outputLen, prefillShare, utilization: load });
  return { rate, service, bill };
}

/** Requests a second that are answered at the most, to one per cent; 0 where not one fits. */
function highestRate(deployment, values) {
  const { input: inputLen, output: outputLen } = values;
  if (!deployment.holds(inputLen + outputLen)) return 0;
  return memoized(`most ${keyOf(deployment, values)}`, () => {
    const isStable = (rate) => deployment.service({ inputLen, outputLen, rate }).isStable;
    let [low, high] = [0, 1];
    while (isStable(high)) [low, high] = [high, 2 * high];
    while (high - low > 0.01 * high && high > 1e-6) {
      const middle = (low + high) / 2;
      [low, high] = isStable(middle) ? [middle, high] : [low, middle];
    }
    return low;
  });
}

function nearest(points, load) {
  return points.reduce((best, each) => (Math.abs(each.load - load) < Math.abs(best.load - load) ? each : best));
}

// What was computed lately: dragging one slider does not change what others came to.
const known = new Map();

function memoized(key, make) {
  if (!known.has(key)) {
    if (known.size >= REMEMBERED) known.delete(known.keys().next().value);
    known.set(key, make());
  }
  return known.get(key);
}

const numbers = new WeakMap(); // of deployments
let lastNumber = 0;

function keyOf(deployment, { input, output }) {
  if (!numbers.has(deployment)) numbers.set(deployment, (lastNumber += 1));
  return [numbers.get(deployment), input, output].join();
}
