"""``octavo run-batch``: answer a file of requests, in OpenAI's batch format."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.cli import UsageError, terminal
from octavo.cli.engine_flags import add_engine_flags, engine_kwargs
from octavo.cli.flags import add_json_flag, add_number, add_value, as_command_line

if TYPE_CHECKING:
    from octavo.batches.batch_input import BatchRequest
    from octavo.batches.batch_run import BatchSummary

EXAMPLES = """\
IN has a request a line: {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
"body": {"messages": [...]}}. OUT gets an answer a line, as they come. Run it again after an
interruption: what has an answer in OUT is left out. Requests whose prompts begin alike are sent one
after the other, so that what they share is computed once.

examples:
  octavo run-batch requests.jsonl answers.jsonl --model qwen2.5-coder-0.5b
  octavo run-batch requests.jsonl answers.jsonl --base-url http://127.0.0.1:8000
"""
_CONCURRENCY = 64


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("requests", metavar="IN", help="the file of requests (JSONL)")
    parser.add_argument("answers", metavar="OUT", help="the file of answers, which may have some")
    add_value(parser, "--model NAME", "the model that answers (default: the one that IN names)")
    add_value(parser, "--base-url URL", "a server that runs; its key is in OCTAVO_API_KEY")
    add_number(parser, "--concurrency", f"requests at a time (default: {_CONCURRENCY})")
    add_json_flag(parser)
    add_engine_flags(parser, often=("threads", "max_model_len"))


def run(args: argparse.Namespace) -> int:
    from octavo.batches.batch_input import read_requests

    engine = engine_kwargs(args)
    if args.base_url is not None and (engine or args.model):
        flag = "--model" if args.model else "--" + next(iter(engine)).replace("_", "-")
        raise UsageError(
            f"{flag} is for a server that is started here: it goes not with --base-url"
        )
    source, target = Path(args.requests), Path(args.answers)
    if source.absolute() == target.absolute():
        raise UsageError("IN and OUT are the same file")
    concurrency = args.concurrency or _CONCURRENCY
    with (
        _server(args, read_requests(source), as_command_line(engine)) as url,
        terminal.request_progress() as progress,
    ):
        summary = asyncio.run(_run(source, target, url, concurrency, progress))
    return _tell(args, summary)


def _server(
    args: argparse.Namespace, requests: list[BatchRequest], flags: list[str]
) -> AbstractContextManager[str]:
    """Return the URL of a server that runs, or of one that is started for the time."""
    from octavo.bench.serving.endpoint import server_url
    from octavo.bench.serving.server_process import running_server

    if args.base_url is not None:
        return nullcontext(server_url(args.base_url))
    names = sorted({request.model for request in requests if request.model is not None})
    if args.model is None and len(names) != 1:
        named = ", ".join(names) or "none"
        raise UsageError(f"say which model answers: --model NAME (the requests name {named})")
    model = args.model or names[0]
    terminal.resolve(model)
    terminal.say(f"starting octavo serve {model}")
    # Bodies may name another model, such as the one that the file was written for.
    aliases = [flag for name in names for flag in ("--served-model-name", name)]
    return running_server(model, [*flags, *aliases])


async def _run(
    source: Path, target: Path, url: str, concurrency: int, progress: Callable[[int, int], None]
) -> BatchSummary:
    from octavo.batches.batch_run import Answer, run_batch
    from octavo.bench.serving.http_client import HttpClient, Response

    key = os.environ.get("OCTAVO_API_KEY")
    client = HttpClient(url, headers={"Authorization": f"Bearer {key}"} if key else None)

    async def send(path: str, body: bytes) -> Answer:
        pieces: list[bytes] = []
        response = Response()
        await client.request("POST", path, body, response, lambda data, _: pieces.append(data))
        return Answer(response.status, response.headers, b"".join(pieces))

    try:
        return await run_batch(source, target, send, concurrency=concurrency, progress=progress)
    finally:
        await client.close()


def _tell(args: argparse.Namespace, summary: BatchSummary) -> int:
    """Result to stdout; 1 if a request failed."""
    if args.json:
        terminal.print_json(
            {
                "output": args.answers,
                "num_requests": summary.num_requests,
                "num_answered_before": summary.num_before,
                "num_failed": summary.num_failed,
            }
        )
    else:
        before = f", {summary.num_before:,} of them before" if summary.num_before else ""
        print(
            f"{args.answers}: {summary.num_requests:,} requests{before}; "
            f"{summary.num_failed:,} failed"
        )
    return 1 if summary.num_failed else 0
