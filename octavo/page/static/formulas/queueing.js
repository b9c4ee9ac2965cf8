// How long requests wait, and how many are under way: octavo/planner/queueing.py (Kleinrock 1975;
// Franx 2001 for the distribution of waits). Rates a second, seconds; overload waits for ever.

const HEAVY = 0.97; // from this load on, waits are taken for exponential

/** Mean wait of arrivals at random before `service` seconds: M/D/1. */
export function md1Wait(rate, service) {
  const load = rate * service;
  return load >= 1 ? Infinity : (load * service) / (2 * (1 - load));
}

/** The wait that a share of the requests do not exceed. */
export function md1WaitQuantile(rate, service, share) {
  const load = rate * service;
  if (load >= 1) return Infinity;
  if (share <= 1 - load) return 0; // so many find nobody there
  if (load > HEAVY) return (md1Wait(rate, service) * -Math.log1p(-share)) / load;
  const shareUpTo = md1Waits(rate, service);
  let high = service;
  while (shareUpTo(high) < share) high *= 2;
  return root((wait) => shareUpTo(wait) - share, 0, high);
}

/** The share of requests that wait no longer than this. */
function md1Waits(rate, service) {
  const load = rate * service;
  const arrivals = poissonTails(load);
  const inSystem = [1 - load];
  const upTo = [1 - load];
  const atMost = (number) => {
    while (upTo.length <= number) {
      // As many services lead from n − 1 requests, or fewer, to n or more as lead back.
      const next = inSystem.length;
      let upwards = inSystem[0] * (arrivals[next] ?? 0);
      for (let before = 1; before < next; before += 1) {
        upwards += inSystem[before] * (arrivals[next - before + 1] ?? 0);
      }
      inSystem.push(upwards / Math.exp(-load));
      upTo.push(upTo.at(-1) + inSystem.at(-1));
    }
    return upTo[number];
  };
  return (wait) => {
    const services = Math.floor(wait / service) + 1;
    const past = rate * (services * service - wait);
    let [term, total] = [Math.exp(-past), 0];
    for (let count = 0; count < services; count += 1) {
      total += term * atMost(services - count);
      term *= past / (count + 1);
    }
    return total;
  };
}

/** Probabilities of n arrivals or more, until they vanish. */
function poissonTails(mean) {
  const shares = [Math.exp(-mean)];
  while (shares.at(-1) > 1e-18) shares.push((shares.at(-1) * mean) / shares.length);
  let tail = 0;
  return shares.reverse().map((share) => (tail += share)).reverse();
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

export function mmkWaitQuantile(rate, service, servers, share) {
  const offered = rate * service;
  if (offered >= servers) return Infinity;
  const waiting = erlangC(servers, offered);
  if (share <= 1 - waiting) return 0;
  return (service / (servers - offered)) * Math.log(waiting / (1 - share));
}

/** Mean time to the first token where prompts have a device of their own (DistServe): alone, in
 * `stages` of a pipeline, or with matrices shared out for a speedup. */
export const prefillLatency = (rate, prefill) => prefill + md1Wait(rate, prefill);
export const prefillLatencyInStages = (rate, prefill) => prefill + md1Wait(rate, prefill / 2);
export const prefillLatencyShared = (rate, prefill, gain) => prefillLatency(rate, prefill / gain);

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
function root(rising, low, high) {
  for (let turn = 0; turn < 80 && high - low > 1e-12 * high; turn += 1) {
    const middle = (low + high) / 2;
    if (rising(middle) < 0) low = middle;
    else high = middle;
  }
  return high;
}
