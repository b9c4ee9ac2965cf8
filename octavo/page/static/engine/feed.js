// The engine's events, for as long as the page is open, whatever happens to server and connection.

import { streamSteps } from "../chat/api.js";

const PAUSES = [500, 1000, 2000, 5000]; // milliseconds before another try

/** Calls `on.event(event)`, `on.lost(error)`; and `on.key(error)` where one is needed, or another one,
 * whose result is waited for. Never returns. */
export async function follow(loadKey, on) {
  for (let failures = 0; ; ) {
    try {
      for await (const event of streamSteps(loadKey())) {
        failures = 0;
        on.event(event);
      }
      on.lost(null);
    } catch (error) {
      if (error.status === 401 || error.status === 403) {
        await on.key(error);
        continue;
      }
      on.lost(error);
    }
    await new Promise((done) => setTimeout(done, PAUSES[Math.min(failures, PAUSES.length - 1)]));
    failures += 1;
  }
}
