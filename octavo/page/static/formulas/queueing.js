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

/**
 * Where a function that rises becomes 0, to a part in 10^12: by inverse quadratic interpolation
 * where its values allow that, else by halves (Chandrupatla 1997). Bisection alone takes five times
 * as many values, and sliders ask for tens of thousands of them.
 */
export function root(rising, low, high) {
  let [last, other, before] = [low, high, high]; // the root is between the first two
  let [atLast, atOther, atBefore] = [rising(low), rising(high), 0];
  let share = 0.5; // of the way from the last to the other
  for (let turn = 0; turn < 80; turn += 1) {
    const next = last + share * (other - last);
    const atNext = rising(next);
    if (atNext < 0 === atLast < 0) [before, atBefore] = [last, atLast];
    else [before, atBefore, other, atOther] = [other, atOther, last, atLast];
    [last, atLast] = [next, atNext];
    const least = (1e-12 * Math.max(last, other)) / Math.abs(other - last);
    if (atLast === 0) return last;
    if (!(least < 1)) break;
    const place = (last - other) / (before - other);
    const height = (atLast - atOther) / (atBefore - atOther);
    const isSmooth = height ** 2 < place && (1 - height) ** 2 < 1 - place; // not where one is infinite
    share = isSmooth
      ? (atLast / (atOther - atLast)) * (atBefore / (atOther - atBefore))
        + ((before - last) / (other - last)) * (atLast / (atBefore - atLast)) * (atOther / (atBefore - atOther))
      : 0.5;
    share = Math.min(1 - least / 2, Math.max(least / 2, share));
  }
  return Math.max(last, other);
}
