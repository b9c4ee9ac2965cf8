// A tensor of a model by its shape, and how devices share it: octavo/cost/weight_shape.py.

/**
 * A matrix from `inputs` values to `outputs`, or a vector (`inputs` is 0). What of it devices share
 * out is `split` (nothing, outputs, inputs), in so many `units`. A token uses `experts_per_token` of
 * `experts`. `op`: the product of a step that it is part of.
 */
export function shape(given) {
  return {
    inputs: 0, op: "", split: "nothing", units: 0, experts: 1, experts_per_token: 1, ...given,
  };
}

/** `dim` outputs of each head. */
export function columns(name, op, heads, dim, inputs) {
  const outputs = heads * dim;
  return shape({ name, part: "attention", outputs, inputs, op, split: "outputs", units: heads });
}

/** `dim` inputs of each head. */
export function rows(name, op, outputs, heads, dim) {
  const inputs = heads * dim;
  return shape({ name, part: "attention", outputs, inputs, op, split: "inputs", units: heads });
}

/** That every device has. */
export function whole(name, op, outputs, inputs) {
  return shape({ name, part: "attention", outputs, inputs, op });
}

/** A vector that is cut as its heads are. */
export function vector(name, heads, dim) {
  return shape({ name, part: "norm", outputs: heads * dim, split: "outputs", units: heads });
}

export function norm(name, outputs) {
  return shape({ name, part: "norm", outputs });
}

export function numParams({ experts, outputs, inputs }) {
  return experts * outputs * Math.max(1, inputs);
}

/** Parameters that one token meets. */
export function numActiveParams(weight) {
  return (numParams(weight) / weight.experts) * weight.experts_per_token;
}

/** What one device has of it; of experts that do not come out even, the fuller device. */
export function ofRank(weight, { tp, ep, dp }) {
  const dealt = weight.part === "experts" && ep > 1;
  const ways = dealt ? Math.floor((tp * dp) / ep) : tp;
  const experts = dealt ? Math.ceil(weight.experts / ep) : weight.experts;
  if (ways === 1 || weight.split === "nothing") return { ...weight, experts };
  const size = weight[weight.split];
  const units = weight.units || size;
  return { ...weight, experts, [weight.split]: Math.ceil(units / ways) * Math.ceil(size / units) };
}
