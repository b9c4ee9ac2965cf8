// What fits into the memory of a device, by a document's `memory`: docs/planning.md.

/** Sequences of so many tokens whose KV cache has room at once, on one device. */
export function maxConcurrency(memory, length) {
  if (isUniform(memory)) return Math.floor(memory.num_blocks / Math.ceil(length / memory.block_size));
  const needed = sequenceBytes(memory, length);
  return needed ? Math.max(0, Math.floor(memory.pool_bytes / needed)) : 0;
}

/** Bytes of a sequence on a device, its states included; windows keep what a step may still see. */
export function sequenceBytes({ attention, block_size: block, step_tokens: added, keeps_windows_only: isCut }, length) {
  return attention.reduce((total, { count, window, kv_bytes_per_token: each, state_bytes: state }) => {
    const kept = isCut && window !== null ? Math.min(length, window - 1 + added) : length;
    return total + count * (Math.ceil(kept / block) * block * each + state);
  }, 0);
}

/** Whether all layers keep as much of a token, for as long as its sequence lasts. */
export function isUniform({ attention, keeps_windows_only: isCut }) {
  return attention.every((op) => !op.state_bytes && (op.window === null || !isCut));
}
