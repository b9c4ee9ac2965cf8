"""A server that does exactly what the prompt says, in a process of its own.

A prompt is JSON: ``first`` and ``gaps`` are seconds before the first event and between events,
``tokens`` how many each event brings (1 if not given), ``status`` and ``retry_after`` a refusal,
``cut`` ends after so many events without a word, ``error`` sends an error event after the first,
``usage`` false does not tell the tokens. Anything else is answered with three events at once.

``GET /log`` gives what it did, with times of ``time.perf_counter()``, which is one clock for all
processes of a machine; ``in_flight`` is the most requests that it had at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

HEAD = "HTTP/1.1 {} X\r\nContent-Type: {}\r\n"


class FakeServer:
    def __init__(self):
        self.log, self.running, self.in_flight = [], 0, 0

    async def serve_connection(self, reader, writer):
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                received = time.perf_counter()
                fields = dict(line.lower().split(": ") for line in head.strip().split("\r\n")[1:])
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                method, path, _ = head.split(" ", 2)
                if method == "GET":
                    self.answer(writer, self.document(path))
                else:
                    await self.complete(writer, path, json.loads(body), fields, received)
        writer.close()

    def document(self, path):
        if path.endswith("/log"):
            return {"requests": self.log, "in_flight": self.in_flight}
        if path.startswith("/nameless/"):
            return {"data": []}
        return {"data": [{"id": "fake/model"}]}

    def answer(self, writer, document, status=200, extra=""):
        text = json.dumps(document)
        head = HEAD.format(status, "application/json") + extra
        writer.write(f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode())

    async def complete(self, writer, path, body, fields, received):
        self.running += 1
        self.in_flight = max(self.in_flight, self.running)
        entry = {"path": path, "body": body, "headers": fields, "received": received, "events": []}
        self.log.append(entry)
        try:
            await self.stream(writer, body, entry)
        finally:
            self.running -= 1
            entry["ended"] = time.perf_counter()

    async def stream(self, writer, body, entry):
        is_chat = "messages" in body
        script = read_script(body["messages"][-1]["content"] if is_chat else body["prompt"])
        if script.get("status"):
            extra = f"Retry-After: {script.get('retry_after', 1)}\r\n"
            error = {"error": {"message": "too many", "code": script["status"]}}
            return self.answer(writer, error, script["status"], extra)
        writer.write(
            (HEAD.format(200, "text/event-stream") + "Transfer-Encoding: chunked\r\n\r\n").encode()
        )
        times = [script["first"]]
        for gap in script["gaps"]:
            times.append(times[-1] + gap)
        tokens = script.get("tokens", [1] * len(times))
        for index, after in enumerate(times):
            if (left := entry["received"] + after - time.perf_counter()) > 0:
                await asyncio.sleep(left)
            if index == script.get("cut"):
                return writer.close()
            text = "ab " * tokens[index]
            choice = {"delta": {"content": text}} if is_chat else {"text": text}
            send(writer, {"choices": [{"index": 0, **choice, "finish_reason": None}]})
            entry["events"].append(time.perf_counter())
            if "error" in script:
                send(writer, {"error": {"message": script["error"]}})
                break
        send(writer, {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        if script.get("usage", True):
            usage = {"prompt_tokens": 7, "completion_tokens": sum(tokens)}
            usage["prompt_tokens_details"] = {"cached_tokens": 2}
            send(writer, {"choices": [], "usage": usage})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


def read_script(prompt):
    try:
        script = json.loads(prompt)
        return script if "first" in script or "status" in script else {"first": 0, "gaps": [0, 0]}
    except (TypeError, ValueError):
        return {"first": 0, "gaps": [0, 0]}


def send(writer, document):
    data = f"data: {json.dumps(document)}\n\n".encode()
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


async def main():
    fake = FakeServer()
    server = await asyncio.start_server(fake.serve_connection, "127.0.0.1", 0, limit=1 << 24)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
