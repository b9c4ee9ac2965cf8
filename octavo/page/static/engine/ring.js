// The last five minutes of an engine, as frames of half a second. Nothing in here knows the page.

export const FRAME_SECONDS = 0.5;
export const MOST_FRAMES = 600;
const MOST_STEPS = 32; // that a frame keeps one by one
const MOST_ROWS = 16; // that it keeps of one of them, the latest
const MOST_REQUESTS = 4096; // whose time on the device is being counted

const empty = (before) => ({
  at: 0,
  state: before?.state ?? "connecting",
  last: before?.last ?? null, // the record of the last step
  tokensIn: 0,
  tokensOut: 0,
  numSteps: 0,
  missed: 0,
  steps: [],
  looks: before?.looks ?? [], // rows of the last steps, of this frame or of those before
  pool: before?.pool ?? null,
  prefixes: before?.prefixes ?? [],
  ended: [],
  ttfts: [],
  gaps: {},
  notes: [],
});

export class Ring {
  frames = [];
  about = null;
  #open = empty();
  #seconds = new Map(); // on the device, by request
  #stepSeconds = 0; // the total when rows were last seen

  /** Take in one event of the stream. */
  take(event) {
    const frame = this.#open;
    if (event.engine) this.#takeState(event);
    frame.missed += event.missed ?? 0;
    const steps = event.steps ? rowsOf(event.steps) : [];
    for (const step of steps) takeStep(frame, step);
    frame.last = event.last ?? frame.last;
    this.#takeLooks(event.looks ?? [], steps);
    for (const one of event.ended ?? []) this.#takeEnd(one);
    frame.ttfts.push(...(event.ttfts ?? []));
    for (const [bucket, count] of event.gaps ?? []) frame.gaps[bucket] = (frame.gaps[bucket] ?? 0) + count;
    for (const [reason, count] of Object.entries(event.rejected ?? {})) frame.notes.push(`${count} refused: ${reason}`);
    if (event.pool) [frame.pool, frame.prefixes] = [event.pool, event.prefixes ?? []];
  }

  /** Say what the page itself has met, such as a lost connection. */
  note(text, state) {
    this.#open.notes.push(text);
    if (state !== undefined) this.#open.state = state;
  }

  /** End the frame: from now on there is one more. */
  close(now) {
    this.#open.at = now;
    this.frames.push(this.#open);
    if (this.frames.length > MOST_FRAMES) this.frames.shift();
    this.#open = empty(this.#open);
  }

  #takeState({ engine, detail, about }) {
    const frame = this.#open;
    if (about) this.about = about;
    if (frame.state !== engine && frame.state !== "connecting") frame.notes.push(`engine ${engine}${detail ? `: ${detail}` : ""}`);
    if (engine === "restarting") {
      this.#seconds.clear();
      [frame.last, frame.pool, frame.prefixes, frame.looks] = [null, null, [], []];
    }
    this.#stepSeconds = 0;
    frame.state = engine;
  }

  #takeLooks(looks, steps) {
    const totals = new Map(steps.map((step) => [step.step_id, step]));
    for (const look of looks) {
      const step = totals.get(look.step_id);
      if (step !== undefined) this.#share(look.rows, step);
    }
    const kept = looks.map((look) => ({ ...look, rows: look.rows.slice(-MOST_ROWS) }));
    this.#open.looks = [...this.#open.looks, ...kept].slice(-MOST_STEPS);
  }

  /** The time since rows were last seen is shared by the tokens that this step computed. */
  #share(rows, { seconds, step_seconds: total }) {
    const passed = this.#stepSeconds === 0 ? seconds : Math.max(0, total - this.#stepSeconds);
    this.#stepSeconds = total;
    const tokens = rows.reduce((sum, row) => sum + row[2] + row[4], 0);
    for (const [id, , computed, , drafted] of rows) this.#charge(requestOf(id), (passed * (computed + drafted)) / tokens);
  }

  #charge(request, seconds) {
    const before = this.#seconds.get(request);
    // A request whose client has left may be in rows after its end; it is not shown any more.
    if (before === undefined && this.#seconds.size >= MOST_REQUESTS) this.#seconds.delete(this.#seconds.keys().next().value);
    this.#seconds.set(request, (before ?? 0) + seconds);
  }

  #takeEnd(one) {
    const seconds = this.#seconds.get(one.id) ?? null;
    this.#seconds.delete(one.id);
    this.#open.ended.push({ ...one, device_seconds: seconds });
    if (one.reason === "error") this.#open.notes.push(`request ${one.id} failed`);
  }
}

/** Columns by name, as one object for each row. */
function rowsOf(columns) {
  const names = Object.keys(columns);
  return columns[names[0]].map((_, index) => Object.fromEntries(names.map((name) => [name, columns[name][index]])));
}

function takeStep(frame, step) {
  frame.numSteps += 1;
  frame.tokensIn += step.num_prompt_tokens;
  frame.tokensOut += step.num_tokens - step.num_prompt_tokens;
  frame.steps.push(step);
  if (frame.steps.length > MOST_STEPS) frame.steps.shift();
}

/** The request of a sample. */
export function requestOf(id) {
  return id.split("#")[0].split("~")[0];
}

/** The frames of the last `seconds` up to the one at `index`. */
export function lately(frames, index, seconds) {
  return frames.slice(Math.max(0, index + 1 - Math.round(seconds / FRAME_SECONDS)), index + 1);
}

/** Counts of inter-token latencies of several frames together: `[[bucket, count]]`. */
export function gapsOf(frames) {
  const all = {};
  for (const { gaps } of frames) {
    for (const [bucket, count] of Object.entries(gaps)) all[bucket] = (all[bucket] ?? 0) + count;
  }
  return Object.entries(all).map(([bucket, count]) => [Number(bucket), count]);
}
