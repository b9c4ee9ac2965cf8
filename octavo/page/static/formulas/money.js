// What answers cost: octavo/planner/money.py. Dollars, hours, watts.

import { mapped, ratio, sure, times } from "./predictions.js";

/** Mean load over capacity, by default. */
export const USUAL_UTILIZATION = 0.6;

const HOURS_PER_YEAR = 8760;
const SECONDS_PER_HOUR = 3600;

/** Between the prices at which it was found for rent; null where it was not. */
export function listed({ usd_per_hour: found }) {
  if (!found) return null;
  const [low, high] = found;
  return { fixed: { value: (low + high) / 2, low, high, source: "published" }, running: 0 };
}

export function rented(dollarsPerHour) {
  return { fixed: sure(dollarsPerHour, "measured"), running: 0 };
}

/** Bought, and paid for within so many years. `overhead`: power from the wall for each watt. */
export function owned(dollars, years, watts, dollarsPerKwh, overhead = 1) {
  const fixed = sure(dollars / (years * HOURS_PER_YEAR), "measured");
  return { fixed, running: (watts / 1000) * dollarsPerKwh * overhead };
}

/** Dollars for a million tokens, of devices that together cost and yield so much. */
export function perMillion(dollarsPerHour, tokensPerSecond) {
  return ratio(dollarsPerHour, times(tokensPerSecond, SECONDS_PER_HOUR / 1e6));
}

/** What is paid, by what is got: of devices that answer so many requests a second at work. */
export function bill(price, {
  numDevices, requestsPerSecond, inputLen, outputLen, prefillShare = 0,
  utilization = USUAL_UTILIZATION, watts = null,
}) {
  const byClock = mapped(price.fixed, (dollars) => dollars + price.running * utilization);
  const working = times(times(byClock, 1 / utilization), numDevices);
  const of = (tokens) => times(requestsPerSecond, tokens);
  const outputs = of(outputLen);
  return {
    utilization,
    perHour: times(byClock, numDevices),
    perDay: times(byClock, numDevices * 24),
    perRequest: ratio(working, times(requestsPerSecond, SECONDS_PER_HOUR)),
    perMillionOutputTokens: perMillion(working, outputs),
    perMillionTokens: perMillion(working, of(inputLen + outputLen)),
    inputPerMillion: perMillion(times(working, prefillShare), of(inputLen)),
    outputPerMillion: perMillion(times(working, 1 - prefillShare), outputs),
    joulesPerOutputToken:
      watts === null ? null : mapped(outputs, (tokens) => (watts * numDevices) / tokens),
  };
}
