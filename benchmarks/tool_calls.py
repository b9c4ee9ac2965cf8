"""Count how often a model calls the right tool, with valid arguments, through an OpenAI API.

    python benchmarks/tool_calls.py URL --model NAME [--limit N] [--concurrency N] [--output FILE]

The prompts are the 60 of tool_calls.json, each with one to six tools, of which one fits. Requests
are greedy, with ``tool_choice`` "auto": whether to call is the model's choice. Counted are answers
whose first call names the right tool; of these, the ones whose arguments are valid by the tool's
schema; and of these, the ones with the values that the prompt gives, where it leaves no choice. Any
server of the API may be asked, and the same file of weights behind each makes a fair comparison:

    octavo serve qwen2.5-coder-1.5b --port 8000
    python benchmarks/tool_calls.py http://127.0.0.1:8000 --model qwen2.5-coder-1.5b
    llama-server -m qwen2.5-coder-1.5b-instruct-q4_k_m.gguf --jinja --port 8080
    python benchmarks/tool_calls.py http://127.0.0.1:8080 --model any
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema

PROMPTS = Path(__file__).with_suffix(".json")
MAX_TOKENS = 256
TIMEOUT = 1200  # seconds, of one answer


class Outcome(NamedTuple):
    """The outcome of one answer; each of the flags takes the one before it."""

    prompt: str
    calls: list[dict[str, Any]]
    content: str
    is_right_tool: bool = False
    is_valid: bool = False
    has_values: bool = False


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url", help="of the server, without /v1")
    parser.add_argument("--model", required=True)
    parser.add_argument("--limit", type=int, help="ask the first N prompts alone")
    parser.add_argument("--concurrency", type=int, default=4, help="requests at once (4)")
    parser.add_argument("--output", type=Path, help="write outcomes as JSON")
    args = parser.parse_args(arguments)

    known = json.loads(PROMPTS.read_text())

    def outcome_of(case: Mapping[str, Any]) -> Outcome:
        answer = ask(args.url, request_of(case, known["tools"], args.model))
        outcome = judge(case, known["tools"], answer)
        print("." if outcome.is_valid else "x", end="", file=sys.stderr, flush=True)
        return outcome

    with ThreadPoolExecutor(args.concurrency) as threads:
        outcomes = list(threads.map(outcome_of, known["prompts"][: args.limit]))
    print(file=sys.stderr)
    print(json.dumps(counts(outcomes)))
    if args.output is not None:
        found = {"counts": counts(outcomes), "outcomes": [each._asdict() for each in outcomes]}
        args.output.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def request_of(case: Mapping[str, Any], tools: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return the body of the request for a prompt of the file."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": case["prompt"]}],
        "tools": [
            {"type": "function", "function": {"name": name, **tools[name]}}
            for name in case["tools"]
        ],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
    }


def ask(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message that a server answers with.

    A server that fails to read what its model wrote says so with an error: that is an answer
    without a call.
    """
    request = urllib.request.Request(
        url.rstrip("/") + "/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            return json.load(answer)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        if error.code != 500:
            raise SystemExit(f"{url}: {error}: {error.read().decode()[:500]}") from error
        return {"content": f"{error}: {error.read().decode()[:500]}"}


def judge(case: Mapping[str, Any], tools: Mapping[str, Any], message: Mapping[str, Any]) -> Outcome:
    """Compare an answer with what the prompt asks for."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    outcome = Outcome(case["prompt"], calls, message.get("content") or "")
    if not calls or calls[0]["name"] != case["call"]:
        return outcome
    outcome = outcome._replace(is_right_tool=True)
    try:
        given = json.loads(calls[0]["arguments"])
        jsonschema.validate(given, tools[case["call"]]["parameters"])
    except (ValueError, jsonschema.ValidationError):
        return outcome
    wanted = case["arguments"].items()
    has_values = all(_same(given.get(name), value) for name, value in wanted)
    return outcome._replace(is_valid=True, has_values=has_values)


def _same(given: Any, wanted: Any) -> bool:
    if isinstance(given, str) and isinstance(wanted, str):
        return given.strip().casefold() == wanted.casefold()
    return given == wanted


def counts(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Return how many answers came how far."""
    return {
        "prompts": len(outcomes),
        "called": sum(bool(each.calls) for each in outcomes),
        "right_tool": sum(each.is_right_tool for each in outcomes),
        "right_tool_valid_arguments": sum(each.is_valid for each in outcomes),
        "right_values_too": sum(each.has_values for each in outcomes),
    }


if __name__ == "__main__":
    main()
