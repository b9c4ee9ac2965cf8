// What models lost that octavo had made smaller: the figures of docs/quantization.md, "What it
// costs", which says how they were taken. `type`: of rounding.js, where all matrices have it.

export const MEASURED_ON = "a twin of SmolLM2-135M, 3,066 tokens";

/** KL divergence from the float32 model in nats; bits are those of all tensors together. */
export const MEASURED = [
  { name: "Q8_0", bits: 8.51, kl: 0.00063, isGguf: true, type: "Q8_0" },
  { name: "Q6_K", bits: 8.12, kl: 0.0021, isGguf: true },
  { name: "Q5_K_M", bits: 6.56, kl: 0.0104, isGguf: true },
  { name: "Q4_K_M", bits: 6.17, kl: 0.0297, isGguf: true },
  { name: "Q4_0", bits: 5.36, kl: 0.16, isGguf: true, type: "Q4_0" },
  { name: "FP8 (e4m3), rows", bits: 9.72, kl: 0.0055, type: "fp8" },
  { name: "NF4, doubly quantized", bits: 6.64, kl: 0.08 },
  { name: "GPTQ, 4 bits, symmetric, groups of 64", bits: 6.81, kl: 0.11 },
  { name: "rtn, 4 bits, groups of 64", bits: 6.73, kl: 0.238, type: "int4-g64" },
  { name: "GPTQ, 2 bits, asymmetric, groups of 32", bits: 5.39, kl: 1.16 },
  { name: "AutoRound, the same", bits: 5.39, kl: 0.69 },
];

/** Of a type; undefined where there is none. */
export function measuredOf(type) {
  return MEASURED.find((each) => each.type === type);
}
