// The questions that decide how a model is served, in their order, each with the numbers that answer
// it: octavo/planner/decisions.py and layouts.py.

import { CannotBe } from "./errors.js";
import { roundHalfEven } from "./rank.js";

const ROOMY = 0.2; // of the memory, left for the KV cache where a model has room
const SLOW_LINK = 100e9; // bytes a second; PCIe is below, and NVLink above

/** `[{ id, answer, numbers }]` for `{ inputLen, outputLen, rate }`: all that apply. */
export function decisions(deployment, traffic) {
  const service = deployment.holds(totalLen(traffic)) ? deployment.service(traffic) : null;
  const isStable = service !== null && service.isStable;
  return [
    fitsOneDevice(deployment, traffic),
    gainsByTensors(deployment, traffic),
    ...(deployment.numDevices > 1 ? [hasFastLink(deployment), staysInMachine(deployment)] : []),
    waitsForMemory(deployment, traffic, isStable ? service : null),
    isStable ? waitsForPrompts(deployment, service) : null,
    isShortOfCache(deployment, traffic),
  ].filter(Boolean);
}

const totalLen = ({ inputLen, outputLen }) => inputLen + outputLen;

function fitsOneDevice(deployment, traffic) {
  const one = deployment.with({ tp: 1, pp: 1, ep: 1, dp: 1, replicas: 1 });
  const { weightsBytes, keptBackBytes, usableBytes } = one.memory;
  const share = Math.max(0, 1 - (weightsBytes + keptBackBytes) / usableBytes);
  const fitting = one.maxConcurrency(totalLen(traffic));
  const numbers = { weightsBytes, usableBytes, share, fitting, length: totalLen(traffic) };
  return { id: "one device", answer: share >= ROOMY && fitting >= 1, numbers };
}

/** Null where such a model cannot be laid out so, or devices have no link. */
function gainsByTensors(deployment, { inputLen }) {
  const { tp } = deployment.parallel;
  const ofLoneStream = (each) => {
    const { compute, communication } = each.stepCost([[inputLen, 1]]);
    return [compute.value, communication.value];
  };
  try {
    const wider = deployment.with({ tp: 2 * tp, pp: 1, ep: 1, dp: 1, replicas: 1 });
    const [[work, talk], [lessWork, moreTalk]] = [ofLoneStream(deployment), ofLoneStream(wider)];
    const answer = work - lessWork > moreTalk - talk;
    return { id: "tensors", answer, numbers: { tp, work, lessWork, talk, moreTalk } };
  } catch (error) {
    if (error instanceof CannotBe) return null;
    throw error;
  }
}

function hasFastLink({ device: { link, link_kind: kind } }) {
  const bandwidth = link?.bandwidth ?? 0;
  return { id: "link", answer: bandwidth >= SLOW_LINK, numbers: { bandwidth, kind } };
}

function staysInMachine({ device, numDevices, replicas }) {
  const each = numDevices / replicas;
  const island = device.link_kind.includes("NVL72") ? 72 : 8;
  return { id: "machine", answer: each <= island, numbers: { each, island } };
}

function waitsForMemory(deployment, { inputLen, outputLen }, service) {
  const streams = service ? Math.max(1, roundHalfEven(service.streams.value / deployment.numGroups)) : 1;
  const context = inputLen + Math.floor(outputLen / 2);
  const cost = deployment.stepCost([[context, 1, 1, 0, streams]]);
  const biggest = cost.ops.reduce((one, other) => (other.seconds > one.seconds ? other : one));
  const { name, intensity, ridge } = biggest;
  const numbers = { streams, name, intensity, ridge, bound: cost.bound, seconds: cost.total.value };
  return { id: "memory", answer: cost.bound === "memory", numbers };
}

function waitsForPrompts({ limits }, { prefillShare }) {
  const numbers = { share: prefillShare, budget: limits.stepTokens };
  return { id: "prompts", answer: prefillShare > 0.5, numbers };
}

function isShortOfCache(deployment, traffic) {
  const fitting = deployment.maxConcurrency(totalLen(traffic));
  const slots = deployment.limits.maxNumSeqs * deployment.numGroups;
  const numbers = { fitting, slots, length: totalLen(traffic) };
  return { id: "cache", answer: fitting < slots, numbers };
}
