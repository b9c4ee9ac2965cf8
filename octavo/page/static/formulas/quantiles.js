// What a share of the requests do not exceed: the quantiles of octavo/planner/queueing.py, and that
// of the normal distribution. Rates a second, seconds; overload waits for ever.

import { erlangC, md1Wait, root } from "./queueing.js";

const HEAVY = 0.97; // from this load on, waits of M/D/1 are taken for exponential (Kingman 1961)
const LEAST = 1e-15; // chances that no sum comes nearer by

/** Of waits before `service` seconds: M/D/1, as in Franx (2001). */
export function md1WaitQuantile(rate, service, share) {
  const load = rate * service;
  if (load >= 1) return Infinity;
  if (share <= 1 - load) return 0; // this share does not have to wait
  if (load > HEAVY) return (md1Wait(rate, service) * -Math.log1p(-share)) / load;
  const waits = new Waits(rate, service);
  let high = service;
  while (waits.shareUpTo(high) < share) high *= 2;
  return root((wait) => waits.shareUpTo(wait) - share, 0, high);
}

/** The distribution of these waits. */
class Waits {
  constructor(rate, service) {
    const load = rate * service;
    Object.assign(this, { rate, service, load });
    this.inSystem = [1 - load]; // probability of n requests
    this.upTo = [1 - load]; // and of at most n
    this.tails = poissonTails(load); // of so many arrivals, or more, while one is served
  }

  shareUpTo(wait) {
    const services = Math.trunc(wait / this.service) + 1;
    const past = this.rate * (services * this.service - wait);
    let [term, total] = [Math.exp(-past), 0];
    for (let count = 0; count < services; count += 1) {
      total += term * this.#atMost(services - count);
      term *= past / (count + 1);
    }
    return total;
  }

  #atMost(number) {
    while (this.upTo.length <= number) this.#addOne();
    return this.upTo[number];
  }

  /** As many services lead from n - 1 requests, or fewer, to n or more as lead back. */
  #addOne() {
    const { inSystem, tails } = this;
    const number = inSystem.length;
    let upwards = inSystem[0] * (tails[number] ?? 0);
    for (let before = 1; before < number; before += 1) upwards += inSystem[before] * (tails[number - before + 1] ?? 0);
    inSystem.push(upwards / Math.exp(-this.load));
    this.upTo.push(this.upTo.at(-1) + inSystem.at(-1));
  }
}

/** Probabilities of n or more, until they vanish. */
function poissonTails(mean) {
  const shares = [Math.exp(-mean)];
  while (shares.at(-1) > 1e-18) shares.push((shares.at(-1) * mean) / shares.length);
  let sum = 0;
  return shares.reverse().map((share) => (sum += share)).reverse();
}

/** Of waits where times of service are exponential: M/M/k. */
export function mmkWaitQuantile(rate, service, servers, share) {
  const offered = rate * service;
  if (offered >= servers) return Infinity;
  const waiting = erlangC(servers, offered);
  return share <= 1 - waiting ? 0 : (service / (servers - offered)) * Math.log(waiting / (1 - share));
}

/** The number of delays during a stay: `mean` come anyhow, and each brings `further` more
 * (generalized Poisson: Consul and Jain, 1973). */
export function delaysQuantile(mean, further, share) {
  let [number, total, logFactorial] = [0, Math.exp(-mean), 0];
  while (total < share) {
    number += 1;
    logFactorial += Math.log(number);
    const rate = mean + number * further;
    const chance = Math.exp(Math.log(mean) + (number - 1) * Math.log(rate) - rate - logFactorial);
    if (chance < LEAST && number > mean / (1 - further)) break;
    total += chance;
  }
  return number;
}

// Wichura, "The percentage points of the normal distribution" (Applied Statistics 37, 1988): ratios
// of polynomials, highest power first; near the middle, and beside it.
const MIDDLE = [
  [2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
    13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.387132872796366608],
  [5226.495278852854561, 28729.085735721942674, 39307.89580009271061, 21213.794301586595867,
    5394.1960214247511077, 687.1870074920579083, 42.313330701600911252, 1],
];
const BESIDE = [
  [7.7454501427834140764e-4, 0.0227238449892691845833, 0.24178072517745061177, 1.27045825245236838258,
    3.64784832476320460504, 5.7694972214606914055, 4.6303378461565452959, 1.42343711074968357734],
  [1.05075007164441684324e-9, 5.475938084995344946e-4, 0.0151986665636164571966, 0.14810397642748007459,
    0.68976733498510000455, 1.6763848301838038494, 2.05319162663775882187, 1],
];

/** Of the standard normal distribution, for shares from 10^-10 to 1 - 10^-10. */
export function normalQuantile(share) {
  const beyond = share - 0.5;
  if (Math.abs(beyond) <= 0.425) return beyond * quotient(MIDDLE, 0.180625 - beyond * beyond);
  const distance = Math.sqrt(-Math.log(Math.min(share, 1 - share)));
  return Math.sign(beyond) * quotient(BESIDE, distance - 1.6);
}

function quotient(polynomials, at) {
  const [above, below] = polynomials.map((factors) => factors.reduce((sum, factor) => sum * at + factor));
  return above / below;
}
