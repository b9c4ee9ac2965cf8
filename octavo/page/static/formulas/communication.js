// What ranks say to each other, and the time that takes: octavo/cost/communication.py.

// Between machines, for each device: 400 Gbit/s of which 0.8 is reached.
const NETWORK_REACHED = 40e9;
const NETWORK_LATENCY_S = 20e-6;

export const allReduce = (bytes, ranks, link) => collective(2 * bytes, ranks, link);
export const allGather = (bytes, ranks, link) => collective(bytes, ranks, link);
export const allToAll = (bytes, ranks, link) => collective(bytes, ranks, link);

/** Seconds until one rank has what another sends; `ranks` are all there are. */
export function pointToPoint(bytes, link, ranks = 2) {
  if (ranks <= link.island) return floor(2, link) + bytes / reached(2, link);
  return NETWORK_LATENCY_S + bytes / Math.min(reached(2, link), NETWORK_REACHED);
}

function collective(bytes, ranks, link) {
  if (ranks === 1) return 0;
  return floor(ranks, link) + (((ranks - 1) / ranks) * bytes) / reached(ranks, link);
}

/** Bytes a second. */
function reached(ranks, { bandwidth, shares, island }) {
  const own = bandwidth * shares[ranks <= 2 ? 0 : ranks <= 4 ? 1 : 2];
  return ranks <= island ? own : Math.min(own, NETWORK_REACHED);
}

/** The least that an exchange takes: each doubling of the ranks adds a quarter. */
function floor(ranks, { latency_s: latency, island }) {
  const own = latency * (0.75 + 0.25 * Math.ceil(Math.log2(ranks)));
  return ranks <= island ? own : own + NETWORK_LATENCY_S;
}

/** `[{ name, count, bytes, seconds }]` of one pass, on all stages of a pipeline. */
export function transfers(rank, rows, link) {
  const { tp, pp, ep } = rank.parallel;
  const hidden = rows.tokens * rank.hidden * rank.activationBytes;
  const said = [];
  if (tp > 1) said.push(...ofTensors(rank, rows, hidden, link));
  if (ep > tp) said.push(...ofExperts(rank, rows, link));
  if (pp > 1) {
    const seconds = (pp - 1) * pointToPoint(hidden, link, tp * pp);
    said.push({ name: "stages.send", count: pp - 1, bytes: (pp - 1) * hidden, seconds });
  }
  return said;
}

/** Two sums in each layer, but those of experts that come back by themselves; the logits. */
function ofTensors(rank, rows, hidden, link) {
  const { tp, pp, ep } = rank.parallel;
  const count = (2 * rank.layers - (ep > tp ? rank.moeLayers : 0)) * pp;
  const seconds = count * allReduce(hidden, tp, link);
  const said = [{ name: "layers.all_reduce", count, bytes: count * hidden, seconds }];
  if (rows.sampled) {
    const bytes = rows.sampled * rank.vocab * rank.activationBytes;
    said.push({ name: "head.all_gather", count: 1, bytes, seconds: allGather(bytes, tp, link) });
  }
  return said;
}

/** Each row to the experts that it uses, and what they make of it back. */
function ofExperts(rank, rows, link) {
  const experts = rank.matrices.find((matrix) => matrix.experts)?.experts;
  if (!experts || !rank.moeLayers) return [];
  const { tp, pp, ep } = rank.parallel;
  const count = 2 * rank.moeLayers * pp;
  const bytes = ((rows.tokens * experts.perToken) / tp) * rank.hidden * rank.activationBytes;
  const seconds = count * allToAll(bytes, ep, link);
  return [{ name: "experts.all_to_all", count, bytes: count * bytes, seconds }];
}
