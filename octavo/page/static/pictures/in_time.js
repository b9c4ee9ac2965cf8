// How long requests took, how many of them were in time, and up to which rate nearly all are.

const ENOUGH = 0.9; // of the requests within the limits: what a rate is called good for

/** `[value, share of the requests that had at most that]`, of those that have it. */
export function distribution(values) {
  const sorted = values.filter((value) => value !== null).sort((a, b) => a - b);
  return sorted.map((value, index) => [value, (index + 1) / sorted.length]);
}

/** The value that a share of the requests had at most. */
export function quantile(values, share) {
  return distribution(values).find(([, reached]) => reached >= share - 1e-9)?.[0] ?? null;
}

/** What a run is good for: requests within both limits, their share and how many in a second, where
 * it goes on as in its second half. */
export function goodput({ requests, rate }, { ttft, tpot }) {
  const good = requests.filter(([first, next]) => first <= ttft && (next ?? 0) <= tpot).length;
  const share = good / requests.length;
  return { good, share, rate: share * rate };
}

/** The run at the highest rate up to which enough requests are within the limits, or undefined. */
export function knee(runs, limits) {
  const first = runs.findIndex((run) => goodput(run, limits).share < ENOUGH);
  return first === -1 ? runs.at(-1) : runs[first - 1];
}
