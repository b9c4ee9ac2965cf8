// What answers cost: octavo/planner/money.py. Dollars, hours, watts.

import { mapped, ratio, times } from "./predictions.js";

/** Mean load over capacity, by default. */
export const USUAL_UTILIZATION = 0.6;

const SECONDS_PER_HOUR = 3600;

/** Dollars for a million tokens, of devices that together cost and yield so much. */
export function perMillion(dollarsPerHour, tokensPerSecond) {
  return ratio(dollarsPerHour, times(tokensPerSecond, SECONDS_PER_HOUR / 1e6));
}

/** What is paid, by what is got: of devices that answer so many requests a second at work. `price`:
 * dollars of a device and hour, `fixed` as a prediction, and `running` while it works. */
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
