// How long requests wait on average, and how many are under way: octavo/planner/queueing.py
// (Kleinrock 1975). Rates a second, seconds; overload waits for ever.

/** Mean wait of arrivals at random before `service` seconds: M/D/1. */
export function md1Wait(rate, service) {
  const load = rate * service;
  return load >= 1 ? Infinity : (load * service) / (2 * (1 - load));
}

/** The share that has to wait for one of `servers`: Erlang's C. */
export function erlangC(servers, offered) {
  if (offered >= servers) return 1;
  let blocked = 1;
  for (let number = 1; number <= servers; number += 1) {
    blocked = (offered * blocked) / (number + offered * blocked);
  }
  return blocked / (1 - (offered / servers) * (1 - blocked));
}

/** Mean wait where times of service are exponential, with this mean: M/M/k. */
export function mmkWait(rate, service, servers) {
  const offered = rate * service;
  if (offered >= servers) return Infinity;
  return (erlangC(servers, offered) * service) / (servers - offered);
}

/** The least number B = `arriving(B)` of streams; null where more than `most` would be there. */
export function balance(arriving, most) {
  if (arriving(0) <= 0) return 0;
  let [low, high] = [0, Math.min(1, most)];
  while (arriving(high) > high) {
    if (high >= most) return null;
    [low, high] = [high, Math.min(2 * high, most)];
  }
  return root((number) => number - arriving(number), low, high);
}

/** Where a function that rises becomes 0, by bisection, to a part in 10^12. */
export function root(rising, low, high) {
  for (let turn = 0; turn < 80 && high - low > 1e-12 * high; turn += 1) {
    const middle = (low + high) / 2;
    if (rising(middle) < 0) low = middle;
    else high = middle;
  }
  return high;
}
