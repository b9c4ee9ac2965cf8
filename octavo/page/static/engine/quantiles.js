// Percentiles, of values and of counts in buckets.

/** The smallest value that a share `q` of all is not above; null of none. */
export function quantile(values, q) {
  if (values.length === 0) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.max(0, Math.ceil(q * sorted.length) - 1)];
}

/** The same of `[[bucket, count]]`, where a bucket is 2^(bucket / 8) µs and 9 % more: its middle. */
export function quantileOfBuckets(counts, q) {
  const total = counts.reduce((sum, [, count]) => sum + count, 0);
  let left = Math.max(1, Math.ceil(q * total));
  for (const [bucket, count] of [...counts].sort(([a], [b]) => a - b)) {
    left -= count;
    if (left <= 0) return 1e-6 * 2 ** ((Number(bucket) + 0.5) / 8);
  }
  return null;
}
