// The server's API, as far as the page uses it. Addresses are relative, so that the page works
// below a path of a reverse proxy too.

import { SseParser } from "./sse.js";

/** What went wrong with a request, in words for people. `retryAt` is a `Date.now()` or null. */
export class ApiError extends Error {
  constructor(status, message, { code = null, retryAt = null, requestId = null } = {}) {
    super(message);
    this.status = status; // 0: there was no answer
    this.code = code;
    this.retryAt = retryAt;
    this.requestId = requestId;
  }

  get title() {
    if (this.code === "connection_lost") return "The connection was lost";
    if (this.code === "context_length_exceeded") return "Too long for the model";
    switch (this.status) {
      case 0:
        return "The server cannot be reached";
      case 200:
        return "The answer broke off";
      case 401:
        return "An API key is needed";
      case 403:
        return "The server does not allow this";
      case 404:
        return "The server does not have this";
      case 413:
        return "The message is too large";
      case 429:
        return "Too many requests";
      case 503:
        return "The server is busy";
      case 504:
        return "It took too long";
      default:
        return this.status >= 500 ? "The server had an error" : "The server refused the request";
    }
  }
}

const NO_ANSWER = "Check that octavo is still running, then try again.";
const CUT = "The server closed the connection before the answer was complete.";

/** The models that are served: `[{ id, max_model_len, … }]`. */
export async function listModels(key, signal) {
  const response = await send("v1/models", { headers: authorization(key), signal });
  const body = await response.json().catch(() => null);
  if (!Array.isArray(body?.data)) {
    throw new ApiError(response.status, "The list of models was not understood.");
  }
  return body.data;
}

/**
 * A chat completion, chunk by chunk. Ends after `[DONE]`; throws an ApiError for everything that
 * went wrong, and the AbortError of `signal` if it was stopped.
 */
export async function* streamChat(body, { key, signal }) {
  const response = await send("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...authorization(key) },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  const requestId = response.headers.get("x-request-id");
  for await (const { data } of events(response, signal)) {
    if (data === "[DONE]") return;
    const chunk = fromJson(data);
    if (chunk === null) throw new ApiError(200, "A part of it was not understood.", { requestId });
    if (chunk.error) throw errorOf(200, chunk.error, { requestId });
    yield chunk;
  }
  throw new ApiError(200, CUT, { code: "connection_lost", requestId });
}

/** What the engine does, event by event, as long as the connection lasts: see docs/server.md. */
export async function* streamSteps(key) {
  const response = await send("steps?snapshots=true", { headers: authorization(key) });
  for await (const { data } of events(response)) {
    const event = fromJson(data);
    if (event !== null) yield event;
  }
}

async function* events(response, signal) {
  const parser = new SseParser();
  const reader = response.body.getReader();
  try {
    while (true) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.push(value);
    }
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(200, CUT, { code: "connection_lost" });
  } finally {
    reader.cancel().catch(() => {}); // lets go of the connection if the consumer left early
  }
}

async function send(address, options) {
  let response;
  try {
    response = await fetch(address, { cache: "no-store", ...options });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ApiError(0, NO_ANSWER);
  }
  if (response.ok) return response;
  const body = fromJson(await response.text().catch(() => ""));
  throw errorOf(response.status, body?.error ?? body?.detail, {
    retryAt: retryTime(response.headers, Date.now()),
    requestId: response.headers.get("x-request-id"),
  });
}

function errorOf(status, error, context) {
  const message = typeof error === "string" ? error : error?.message;
  const code = typeof error?.code === "string" ? error.code : null;
  return new ApiError(status, String(message ?? `It answered with status ${status}.`), {
    code,
    ...context,
  });
}

/** When a refused request may come again, in milliseconds since 1970; null if nothing says so. */
export function retryTime(headers, now) {
  const milliseconds = headers.get("retry-after-ms");
  if (/^\d+(\.\d+)?$/.test(milliseconds ?? "")) return now + Number(milliseconds);
  const value = headers.get("retry-after") ?? "";
  if (/^\d+$/.test(value)) return now + 1000 * Number(value);
  const date = Date.parse(value);
  return Number.isNaN(date) ? null : Math.max(date, now);
}

function authorization(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function fromJson(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
