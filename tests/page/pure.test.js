// Settings, figures and error texts: the parts of the page that need no page.

import assert from "node:assert/strict";
import { test } from "node:test";
import { ApiError, listModels, retryTime, streamChat } from "./static/chat/api.js";
import { whyItEnded } from "./static/chat/ending.js";
import { emptyRound } from "./static/chat/rounds.js";
import { DEFAULTS, defaultsOf, problemWith, toMessages, toRequest } from "./static/chat/settings.js";
import { Stopwatch, describe, seconds } from "./static/chat/stats.js";

const words = (numbers) => describe(numbers).map(({ text }) => text);
const text = (content) => ({ choices: [{ delta: { content } }] });
const said = (text) => ({ rounds: [{ ...emptyRound(), text }] });

// A model whose authors say how to sample.
const SAID = { sampling_defaults: { temperature: 0.6, top_p: 0.8, top_k: 20 } };

test("settings that were left empty are not sent", () => {
  assert.deepEqual(toRequest(DEFAULTS, SAID), {});
  assert.equal(defaultsOf(SAID).temperature, 0.6);
});

test("where nobody says how to sample, the page does", () => {
  for (const model of [undefined, {}, { sampling_defaults: null }]) {
    assert.deepEqual(toRequest(DEFAULTS, model), { temperature: 0.7, top_p: 0.95 });
    assert.deepEqual(defaultsOf(model), { temperature: 0.7, top_p: 0.95 });
  }
  const half = { sampling_defaults: { temperature: 0.6 } };
  assert.deepEqual(toRequest(DEFAULTS, half), { top_p: 0.95 });
  assert.deepEqual(toRequest({ ...DEFAULTS, top_p: "1", temperature: "0" }, {}), {
    temperature: 0,
    top_p: 1,
  });
});

test("settings are sent as numbers, stop strings as a list", () => {
  const chosen = { temperature: " 0 ", top_p: "0.9", max_tokens: "64", seed: "7" };
  const stop = "END\n\n\\n\\nUser:\na\\\\n";
  assert.deepEqual(toRequest({ ...DEFAULTS, ...chosen, stop }, SAID), {
    temperature: 0, top_p: 0.9, max_tokens: 64, seed: 7, stop: ["END", "\n\nUser:", "a\\n"],
  });
});

test("settings that cannot be are named, and not sent", () => {
  const bad = { temperature: ["-1", "hot", "1e9", "0,5"], top_p: ["0", "1.1"], max_tokens: ["0", "1.5"],
    seed: ["-1", "1e30", "NaN"] };
  for (const [name, values] of Object.entries(bad)) {
    for (const value of values) {
      assert.notEqual(problemWith(name, value), "", `${name}=${value}`);
      assert.deepEqual(toRequest({ ...DEFAULTS, [name]: value }, SAID), {});
    }
    assert.equal(problemWith(name, ""), "");
    assert.equal(problemWith(name, "1"), "");
  }
});

test("messages alternate: turns without an answer are left out, but for the last", () => {
  const turns = [
    { user: "a", answer: said("A") },
    { user: "b", answer: said("") },
    { user: "c", answer: null },
    { user: "d", answer: { rounds: [] } },
  ];
  assert.deepEqual(toMessages(" ", turns), [
    { role: "user", content: "a" },
    { role: "assistant", content: "A" },
    { role: "user", content: "d" },
  ]);
  assert.deepEqual(toMessages("Be brief.", turns)[0], { role: "system", content: "Be brief." });
});

test("while it streams, figures are the page's own", () => {
  const watch = new Stopwatch(1000);
  assert.deepEqual(words(watch.numbers()), []);
  watch.take({ choices: [{ delta: { role: "assistant", content: "" } }] }, 1100);
  assert.deepEqual(words(watch.numbers()), []);
  watch.take(text("a"), 1250);
  watch.take(text("b"), 1300);
  watch.take(text("c"), 1350);
  assert.deepEqual(words(watch.numbers()), ["20.0 tokens/s", "first token 250 ms", "about 3 tokens"]);
});

test("at its end, the server's figures win", () => {
  const watch = new Stopwatch(0);
  watch.take(text("a"), 2000);
  watch.take({ choices: [{ delta: {}, finish_reason: "length" }] }, 3000);
  watch.take({
    choices: [],
    usage: { prompt_tokens: 1234, completion_tokens: 1, prompt_tokens_details: { cached_tokens: 1200 } },
    timings: { predicted_per_second: 123.4 },
  }, 3001);
  assert.deepEqual(words(watch.numbers()), [
    "123 tokens/s", "first token 2.00 s", "1 token", "prompt 1,234 tokens (1,200 cached)",
  ]);
});

test("each end of an answer has its reason", () => {
  const stats = { finish: "stop", stopReason: null, prompt: 90, output: 10 };
  const why = (more, { limits = {}, text = "…", ...answer } = {}) =>
    whyItEnded({ status: "done", ...said(text), stats: { ...stats, ...more }, limits, ...answer });
  assert.equal(why({}), "The model ended the answer by itself.");
  assert.equal(why({ stopReason: "END\n" }), 'It came to "END\\n", at which it was asked to stop.');
  assert.equal(why({ stopReason: 7 }), "It drew the token 7, at which it was asked to stop.");
  const length = { finish: "length" };
  const limits = { answer: 10, context: 100 };
  assert.equal(why(length, { limits }), "It was cut at Max tokens: 10 tokens.");
  assert.equal(why(length, { limits: { ...limits, answer: 11 } }), "It was cut at the end of the context: 100 tokens.");
  assert.match(why(length), /the server's limit/);
  assert.match(why(length, { limits: undefined }), /the server's limit/); // kept by an older page
  assert.equal(why({ finish: "abort" }), "The server stopped it.");
  assert.equal(why({ finish: "filter" }), "It ended by filter.");
  assert.equal(why({}, { text: " " }), "The answer is empty. The model ended the answer by itself.");
  assert.equal(why({}, { status: "stopped" }), "You stopped it.");
  assert.equal(why({}, { status: "stopped", text: "" }), "You stopped it before it began.");
  assert.equal(why({}, { status: "left" }), "The page was left, which stopped it.");
  for (const status of ["waiting", "streaming", "failed"]) assert.equal(why({}, { status }), "");
});

test("without timings, the speed is tokens of the usage over the time they came in", () => {
  const watch = new Stopwatch(0);
  watch.take(text("two tokens"), 1000);
  watch.take(text("two more"), 2000);
  watch.take({ choices: [], usage: { prompt_tokens: 5, completion_tokens: 4 } }, 2001);
  assert.equal(watch.numbers().rate, 3);
  watch.take({ choices: [], timings: { predicted_per_second: null } }, 2002);
  assert.equal(watch.numbers().rate, 3);
});

test("times have a fitting unit", () => {
  assert.deepEqual([0.0214, 1, 9.994, 12.34].map(seconds), ["21 ms", "1.00 s", "9.99 s", "12.3 s"]);
});

test("when to come again: milliseconds, seconds, a date, or nothing", () => {
  const at = (headers) => retryTime(new Headers(headers), 5000);
  assert.equal(at({ "retry-after": "3" }), 8000);
  assert.equal(at({ "retry-after": "3", "retry-after-ms": "250" }), 5250);
  assert.equal(at({ "retry-after": "Thu, 01 Jan 1970 00:00:09 GMT" }), 9000);
  assert.equal(at({ "retry-after": "Thu, 01 Jan 1970 00:00:01 GMT" }), 5000);
  assert.equal(at({ "retry-after": "soon" }), null);
  assert.equal(at({}), null);
});

/** Let `fetch` answer this once. */
function answerWith(t, body, init) {
  t.mock.method(globalThis, "fetch", async () => new Response(body, init));
}

async function failure(promise) {
  return promise.then(
    () => assert.fail("it went well"),
    (error) => error,
  );
}

async function collect(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

test("a stream ends with [DONE]", async (t) => {
  answerWith(t, ': hello\n\ndata: {"n":1}\n\ndata: [DONE]\n\ndata: {"n":2}\n\n');
  assert.deepEqual(await collect(streamChat({}, {})), [{ n: 1 }]);
});

test("a stream without [DONE] was cut", async (t) => {
  answerWith(t, 'data: {"n":1}\n\n');
  const error = await failure(collect(streamChat({}, {})));
  assert.ok(error instanceof ApiError);
  assert.equal(error.title, "The connection was lost");
});

test("an error inside a stream is one", async (t) => {
  answerWith(t, 'data: {"error":{"message":"the engine died","code":null}}\n\n', {
    headers: { "x-request-id": "r-1" },
  });
  const error = await failure(collect(streamChat({}, {})));
  assert.deepEqual([error.title, error.message, error.requestId], ["The answer broke off", "the engine died", "r-1"]);
});

test("error bodies of any shape become words", async (t) => {
  const cases = [
    [JSON.stringify({ error: { message: "no", code: "context_length_exceeded" } }), 400, "Too long for the model", "no"],
    [JSON.stringify({ error: "plain" }), 429, "Too many requests", "plain"],
    [JSON.stringify({ detail: "Not Found" }), 404, "The server does not have this", "Not Found"],
    ["<html>Bad Gateway</html>", 502, "The server had an error", "It answered with status 502."],
    ["", 418, "The server refused the request", "It answered with status 418."],
    ["null", 503, "The server is busy", "It answered with status 503."],
  ];
  for (const [body, status, title, message] of cases) {
    answerWith(t, body, { status });
    const error = await failure(listModels(""));
    assert.deepEqual([error.title, error.message], [title, message]);
  }
});

test("no server is said as such, and stopping is no error of the API", async (t) => {
  t.mock.method(globalThis, "fetch", async () => {
    throw new TypeError("Failed to fetch");
  });
  assert.equal((await failure(listModels(""))).title, "The server cannot be reached");
  const controller = new AbortController();
  controller.abort();
  const error = await failure(collect(streamChat({}, { signal: controller.signal })));
  assert.ok(!(error instanceof ApiError));
});
