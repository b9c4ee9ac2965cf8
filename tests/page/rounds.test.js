// Thoughts, calls and the messages that go back to the server.

import assert from "node:assert/strict";
import { test } from "node:test";
import { whyItEnded } from "./static/chat/ending.js";
import { RoundWriter, emptyRound, messagesOf, openCalls, textOf } from "./static/chat/rounds.js";
import { toMessages } from "./static/chat/settings.js";
import { Stopwatch, describe } from "./static/chat/stats.js";
import { definitions, runTool } from "./static/chat/tools.js";

const chunk = (delta, more = {}) => ({ choices: [{ delta, ...more }] });
const piece = (index, text, more = {}) => ({ index, ...more, function: { arguments: text } });
const begun = (index, id, name) => ({ index, id, type: "function", function: { name, arguments: "" } });

function read(chunks) {
  const round = emptyRound();
  const writer = new RoundWriter(round);
  chunks.forEach(([now, each]) => writer.take(each, now));
  return round;
}

test("a thought has its time, until the answer begins", () => {
  const round = read([
    [0, chunk({ role: "assistant", content: "" })],
    [100, chunk({ reasoning_content: "I ", reasoning: "I " })],
    [300, chunk({ reasoning_content: "think", reasoning: "think" })],
    [900, chunk({ content: "So" })],
    [5000, chunk({ content: "." })],
  ]);
  assert.deepEqual([round.thought, round.thoughtMs, round.text], ["I think", 800, "So."]);
});

test("either name of a thought will do, and its end may be that of the answer", () => {
  assert.equal(read([[0, chunk({ reasoning: "a" })]]).thought, "a");
  assert.equal(read([[0, chunk({ reasoning_content: "a" })]]).thought, "a");
  const cut = read([[0, chunk({ reasoning: "a" })], [50, chunk({}, { finish_reason: "length" })], [99, { choices: [] }]]);
  assert.equal(cut.thoughtMs, 50);
});

test("calls in pieces, several at once", () => {
  const round = read([
    [0, chunk({ tool_calls: [begun(0, "a", "calculator")] })],
    [0, chunk({ tool_calls: [piece(0, '{"expr')] })],
    [0, chunk({ tool_calls: [piece(0, 'ession": "1"}'), begun(1, "b", "current_time")] })],
    [0, chunk({ tool_calls: [piece(1, "{}")] })],
    [0, chunk({}, { finish_reason: "tool_calls", warnings: ["odd"] })],
  ]);
  const rest = { result: null, failed: false };
  assert.deepEqual(round.calls, [
    { id: "a", name: "calculator", arguments: '{"expression": "1"}', ...rest },
    { id: "b", name: "current_time", arguments: "{}", ...rest },
  ]);
  assert.deepEqual(round.warnings, ["odd"]);
  assert.equal(openCalls(round, "tool_calls").length, 2);
  assert.deepEqual(openCalls(round, "length"), [], "a call that was cut is not run");
});

const CALL = { id: "a", name: "calculator", arguments: '{"expression": "6*7"}', result: "42", failed: false };

test("history has thoughts, calls and results", () => {
  const rounds = [
    { ...emptyRound(), thought: "hm", calls: [CALL, { ...CALL, id: "b", arguments: "6*", result: "Error: no" }] },
    { ...emptyRound(), text: "It is 42." },
  ];
  const call = (id, text) => ({ id, type: "function", function: { name: "calculator", arguments: text } });
  const messages = [
    { role: "assistant", content: "", reasoning_content: "hm", tool_calls: [call("a", CALL.arguments), call("b", "{}")] },
    { role: "tool", tool_call_id: "a", content: "42" },
    { role: "tool", tool_call_id: "b", content: "Error: no" },
    { role: "assistant", content: "It is 42." },
  ];
  assert.deepEqual(messagesOf(rounds), messages);
  assert.equal(textOf({ rounds }), "It is 42.");
  const user = (content) => ({ role: "user", content });
  // In the middle of a loop, and in a turn after it.
  assert.deepEqual(toMessages("", [{ user: "q", answer: { rounds: rounds.slice(0, 1) } }]), [user("q"), ...messages.slice(0, 3)]);
  assert.deepEqual(toMessages("", [{ user: "q", answer: { rounds } }, { user: "r", answer: { rounds: [] } }]), [
    user("q"), ...messages, user("r"),
  ]);
});

test("a call without a result is not sent again", () => {
  const rounds = [{ ...emptyRound(), text: "Let me see.", calls: [{ ...CALL, result: null }] }];
  assert.deepEqual(messagesOf(rounds), [{ role: "assistant", content: "Let me see." }]);
});

test("tools answer, and say what is wrong", () => {
  const run = (name, text) => runTool({ name, arguments: text }, new Date("2026-07-01T10:00:00Z"));
  assert.deepEqual(run("calculator", '{"expression": "6*7"}'), { result: "42", failed: false });
  assert.deepEqual(JSON.parse(run("current_time", '{"timezone": "Asia/Tokyo"}').result), {
    date: "Wednesday, 1 July 2026", time: "19:00:00", timezone: "Asia/Tokyo", utc_offset: "+09:00",
  });
  assert.equal(run("current_time", "").failed, false);
  const errors = [
    ["calculator", '{"expression": "6*"}', /^Error: At the end a number is missing/],
    ["calculator", '{"expression": 42}', /expression must be a string/],
    ["calculator", "{}", /expression is missing/],
    ["calculator", '{"a": "1"}', /no parameter "a". It has expression/],
    ["calculator", "[1]", /not a JSON object: \[1\]/],
    ["calculator", "null", /not a JSON object/],
    ["calculator", '{"expr', /not a JSON object/],
    ["current_time", '{"timezone": "Mars/Base"}', /no time zone "Mars\/Base"/],
    ["search", "{}", /no tool "search". There are current_time, calculator/],
  ];
  for (const [name, text, words] of errors) {
    const { result, failed } = run(name, text);
    assert.match(result, words);
    assert.ok(failed);
  }
  assert.deepEqual(definitions().map((tool) => tool.function.name), ["current_time", "calculator"]);
});

test("why an answer ended, with calls and thoughts", () => {
  const why = (round, finish) =>
    whyItEnded({ status: "done", rounds: [{ ...emptyRound(), ...round }], stats: { finish, stopReason: null, prompt: 1, output: 9 }, limits: { answer: 9 } });
  assert.match(why({ calls: [CALL] }, "tool_calls"), /stopped after 8 rounds/);
  assert.match(why({ calls: [{ ...CALL, result: null }] }, "tool_calls"), /switched off/);
  assert.match(why({ thought: "hm" }, "length"), /empty. It was cut at Max tokens/);
  assert.equal(whyItEnded({ status: "stopped", rounds: [{ ...emptyRound(), thought: "hm" }] }), "You stopped it.");
});

test("thoughts and calls are tokens, too", () => {
  const watch = new Stopwatch(0);
  watch.take(chunk({ reasoning_content: "a" }), 1000);
  watch.take(chunk({ tool_calls: [begun(0, "a", "b")] }), 2000);
  assert.deepEqual([watch.numbers().ttft, watch.numbers().output], [1, 2]);
  watch.take({ choices: [], usage: { prompt_tokens: 5, completion_tokens: 40, completion_tokens_details: { reasoning_tokens: 30 } } }, 3000);
  const texts = describe({ ...watch.numbers(), round: 2 }).map(({ text }) => text);
  assert.deepEqual([texts[0], texts[3]], ["round 2", "40 tokens (30 thought)"]);
});
