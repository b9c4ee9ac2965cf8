import assert from "node:assert/strict";
import { test } from "node:test";
import { SseParser } from "./static/chat/sse.js";

const bytes = (text) => new TextEncoder().encode(text);

function parse(chunks) {
  const parser = new SseParser();
  return chunks.flatMap((chunk) => parser.push(chunk));
}

const STREAM =
  ': a comment\r\n\r\ndata: {"text":"Grüße, 世界 👩‍🚀"}\r\n\r\n' +
  "data:no space\n\ndata:  two spaces\n\n" +
  "event: error\ndata: one\ndata: two\n\n" +
  "data: one\r\ndata: two\r\ndata: three\r\n\r\n" +
  "id: 7\nretry: 10\ndata\n\n" +
  ": only a comment\n\n" +
  "data: a\rdata: b\r\r" +
  "unknown: x\ndata: [DONE]\n\n" +
  "data: never finished\n";
const EVENTS = [
  { event: "message", data: '{"text":"Grüße, 世界 👩‍🚀"}' },
  { event: "message", data: "no space" },
  { event: "message", data: " two spaces" },
  { event: "error", data: "one\ntwo" },
  { event: "message", data: "one\ntwo\nthree" },
  { event: "message", data: "" },
  { event: "message", data: "a\nb" },
  { event: "message", data: "[DONE]" },
];

test("a whole stream at once", () => {
  assert.deepEqual(parse([bytes(STREAM)]), EVENTS);
});

test("a stream byte by byte", () => {
  const all = bytes(STREAM);
  assert.deepEqual(parse(Array.from(all, (byte) => Uint8Array.of(byte))), EVENTS);
});

test("two chunks, cut at every byte", () => {
  const all = bytes(STREAM);
  for (let cut = 0; cut <= all.length; cut += 1) {
    assert.deepEqual(parse([all.subarray(0, cut), all.subarray(cut)]), EVENTS, `cut at ${cut}`);
  }
});

test("three chunks, cut at every pair of bytes around CRLF and characters", () => {
  const all = bytes("data: é👍\r\n\r\ndata: x\r\n\r\n");
  const expected = parse([all]);
  assert.equal(expected.length, 2);
  for (let first = 0; first <= all.length; first += 1) {
    for (let second = first; second <= all.length; second += 1) {
      const chunks = [all.subarray(0, first), all.subarray(first, second), all.subarray(second)];
      assert.deepEqual(parse(chunks), expected, `${first}, ${second}`);
    }
  }
});

test("events come as soon as they are complete, CR included", () => {
  const parser = new SseParser();
  assert.deepEqual(parser.push(bytes("data: a\r\n\r")), [{ event: "message", data: "a" }]);
  assert.deepEqual(parser.push(bytes("\n")), []);
  assert.deepEqual(parser.push(bytes("data: b\n\n")), [{ event: "message", data: "b" }]);
});

test("a byte order mark is no part of the first field", () => {
  assert.deepEqual(parse([bytes("\uFEFFdata: a\n\n")]), [{ event: "message", data: "a" }]);
});

test("a long line in many chunks takes no more than linear time", () => {
  const piece = bytes("x".repeat(1000));
  const takeIn = (chunks) => {
    const parser = new SseParser();
    const before = process.cpuUsage();
    parser.push(bytes("data: "));
    for (let i = 0; i < chunks; i += 1) parser.push(piece);
    const [{ data }] = parser.push(bytes("\n\n"));
    assert.equal(data.length, 1000 * chunks);
    const { user, system } = process.cpuUsage(before);
    return user + system;
  };
  const few = Math.max(...[1, 2, 3].map(() => takeIn(400)));
  assert.ok(takeIn(4000) < 40 * few, "ten times as long a line; its square is a hundred times as much");
});
