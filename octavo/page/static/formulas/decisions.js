// The questions that decide how a model is served, in their order, each with the numbers that answer
// it: octavo/planner/decisions.py.

const ROOMY = 0.2; // of the memory, left for the KV cache where a model has room

/** `[{ id, answer, numbers }]` for `{ inputLen, outputLen, rate }`: all that apply. `one`: the same
 * on one device; `wider`: with twice the tensor parallelism, null where that is impossible. */
export function decisions(deployment, { one, wider }, traffic) {
  const service = deployment.holds(totalLen(traffic)) ? deployment.service(traffic) : null;
  const isStable = service !== null && service.isStable;
  return [
    fitsOneDevice(one, traffic),
    wider && gainsByTensors(deployment, wider, traffic),
    ...(deployment.numDevices > 1 ? [hasFastLink(deployment), staysInMachine(deployment)] : []),
    waitsForMemory(deployment, traffic, isStable ? service : null),
    isStable ? waitsForPrompts(deployment, service) : null,
    isShortOfCache(deployment, traffic),
  ].filter(Boolean);
}

const totalLen = ({ inputLen, outputLen }) => inputLen + outputLen;

function fitsOneDevice(one, traffic) {
  const { weights_bytes: weightsBytes, kept_back_bytes: keptBackBytes, usable_bytes: usableBytes } = one.memory;
  const share = Math.max(0, 1 - (weightsBytes + keptBackBytes) / usableBytes);
  const fitting = one.maxConcurrency(totalLen(traffic));
  const numbers = { weightsBytes, usableBytes, share, fitting, length: totalLen(traffic) };
  return { id: "one device", answer: share >= ROOMY && fitting >= 1, numbers };
}

function gainsByTensors(deployment, wider, { inputLen }) {
  const { tp } = deployment.parallel;
  const ofLoneStream = (each) => {
    const { compute, communication } = each.step([[inputLen, 1]]);
    return [compute.value, communication.value];
  };
  const [[work, talk], [lessWork, moreTalk]] = [deployment, wider].map(ofLoneStream);
  const answer = work - lessWork > moreTalk - talk;
  return { id: "tensors", answer, numbers: { tp, work, lessWork, talk, moreTalk } };
}

function hasFastLink({ link: { bytes_per_s: bandwidth, kind, is_slow: isSlow } }) {
  return { id: "link", answer: !isSlow, numbers: { bandwidth, kind } };
}

function staysInMachine({ link: { fast_link_devices: island }, numDevices, replicas }) {
  const each = numDevices / replicas;
  return { id: "machine", answer: each <= island, numbers: { each, island } };
}

function waitsForMemory(deployment, { inputLen, outputLen }, service) {
  const streams = service ? Math.max(1, roundHalfEven(service.streams.value / deployment.numGroups)) : 1;
  const context = inputLen + Math.floor(outputLen / 2);
  const cost = deployment.step([[context, 1, 1, 0, streams]]);
  const biggest = cost.ops.reduce((one, other) => (other.seconds > one.seconds ? other : one));
  const { name, intensity, ridge } = biggest;
  const numbers = { streams, name, intensity, ridge, bound: cost.bound, seconds: cost.total.value };
  return { id: "memory", answer: cost.bound === "memory", numbers };
}

function waitsForPrompts({ limits }, { prefillShare }) {
  const numbers = { share: prefillShare, budget: limits.max_num_batched_tokens };
  return { id: "prompts", answer: prefillShare > 0.5, numbers };
}

function isShortOfCache(deployment, traffic) {
  const fitting = deployment.maxConcurrency(totalLen(traffic));
  const slots = deployment.limits.max_num_seqs * deployment.numGroups;
  const numbers = { fitting, slots, length: totalLen(traffic) };
  return { id: "cache", answer: fitting < slots, numbers };
}

/** As Python rounds. */
function roundHalfEven(value) {
  const floor = Math.floor(value);
  if (value - floor !== 0.5) return Math.round(value);
  return floor % 2 === 0 ? floor : floor + 1;
}
