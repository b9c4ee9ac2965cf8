"""Data sets of random prompts of given lengths, and of prompts out of files.

The same seed gives the same requests, in every process. Prompts of token ids have exactly the
wanted length; text is counted by the tokenizer of the model that is measured.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from octavo.base.errors import ConfigError
from octavo.workload.requests import WorkloadRequest
from octavo.workload.rows import (
    BadRow,
    T,
    WorkloadFileError,
    count,
    json_row,
    json_rows,
    open_text,
    peek,
)
from octavo.workload.trace_formats import OctavoTrace
from octavo.workload.traces import (
    KINDS,
    allowed_token_ids,
    detect_trace,
    random_token_ids,
    read_trace,
    to_requests,
)

DATASETS = (
    "auto",
    "random",
    "prefix_repetition",
    "sharegpt",
    "jsonl",
    "custom",
    "trace",
    "timed_trace",
    *KINDS,
)

# The conversations of ShareGPT that are used, as in vLLM's benchmark and others since.
SHAREGPT_MIN_TOKENS = 4
SHAREGPT_MAX_PROMPT = 1024
SHAREGPT_MAX_TOTAL = 2048


class TextCounter(Protocol):
    """A tokenizer, as far as data sets need one."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> Sequence[int]: ...


# -- random -------------------------------------------------------------------------------------


def random_requests(
    num: int,
    vocab_size: int,
    input_len: int,
    output_len: int,
    *,
    range_ratio: float = 0.0,
    length_cv: float = 0.0,
    prefix_len: int = 0,
    seed: int = 0,
    avoid: Collection[int] = (),
) -> list[WorkloadRequest]:
    """Return prompts of random token ids, after ``prefix_len`` random ones that all prompts begin
    with.

    Lengths (without the prefix) are uniform over the whole numbers from ``len * (1 - ratio)``,
    rounded down, to ``len * (1 + ratio)``, rounded up; answers have at least one token. This is
    what vLLM's ``--random-range-ratio`` has meant since 2025. With ``length_cv`` they are
    log-normal instead, as lengths of real prompts roughly are: ``len`` is their mean, and
    ``length_cv`` times that their standard deviation. ``avoid``: ids that must not occur.

    Raises:
        ConfigError: a number is out of range.
    """
    _at_least(0, num_prompts=num, input_len=input_len, prefix_len=prefix_len)
    _at_least(1, output_len=output_len)
    if not 0 <= range_ratio < 1:
        raise ConfigError(f"the range ratio is {range_ratio}, and must be from 0 to below 1")
    if not 0 <= length_cv < math.inf or (length_cv and range_ratio):
        raise ConfigError(
            f"the variation of lengths is {length_cv}: it must be at least 0, and goes not with a "
            "range ratio"
        )
    input_lens = _spread(input_len, range_ratio, least=0)
    output_lens = _spread(output_len, range_ratio, least=1)
    if prefix_len + input_lens.start < 1:
        raise ConfigError("a prompt could be empty: ask for more input or prefix tokens")
    allowed = allowed_token_ids(vocab_size, avoid)
    lengths = random.Random(f"{seed} lengths")
    prefix = random_token_ids(allowed, prefix_len, f"{seed} prefix")
    requests = []
    for index in range(num):
        if length_cv:
            prompt_len, answer_len = (
                _log_normal(mean, length_cv, lengths) for mean in (input_len, output_len)
            )
        else:
            prompt_len, answer_len = lengths.choice(input_lens), lengths.choice(output_lens)
        tokens = random_token_ids(allowed, prompt_len, f"{seed} prompt {index}")
        requests.append(_of_tokens(index, (*prefix, *tokens), answer_len))
    return requests


def prefix_repetition(
    num: int,
    vocab_size: int,
    *,
    num_prefixes: int = 10,
    prefix_len: int = 256,
    suffix_len: int = 256,
    output_len: int = 128,
    seed: int = 0,
    avoid: Collection[int] = (),
) -> list[WorkloadRequest]:
    """Return ``num`` prompts that begin with one of ``num_prefixes`` long prefixes, in random
    order.

    Each prefix is used as often as any other, give or take one.

    Raises:
        ConfigError: a number is out of range.
    """
    _at_least(0, num_prompts=num, prefix_len=prefix_len, suffix_len=suffix_len)
    _at_least(1, num_prefixes=num_prefixes, output_len=output_len)
    if num_prefixes > num:
        raise ConfigError(f"{num} prompts cannot have {num_prefixes} prefixes: ask for fewer")
    if prefix_len + suffix_len < 1:
        raise ConfigError("prompts would be empty: ask for more prefix or suffix tokens")
    allowed = allowed_token_ids(vocab_size, avoid)
    prefixes = [
        random_token_ids(allowed, prefix_len, f"{seed} prefix {i}") for i in range(num_prefixes)
    ]
    order = [index % num_prefixes for index in range(num)]
    random.Random(f"{seed} order").shuffle(order)
    requests = []
    for index, chosen in enumerate(order):
        suffix = random_token_ids(allowed, suffix_len, f"{seed} suffix {index}")
        requests.append(_of_tokens(index, (*prefixes[chosen], *suffix), output_len))
    return requests


def _spread(length: int, ratio: float, least: int) -> range:
    # 100 * 1.1 is a little more than 110, and must not become 111.
    low, high = round(length * (1 - ratio), 6), round(length * (1 + ratio), 6)
    return range(max(least, math.floor(low)), math.ceil(high) + 1)


def _log_normal(mean: float, variation: float, draws: random.Random) -> int:
    """Draw a length of at least 1, whose standard deviation is ``variation`` times its mean."""
    variance = math.log1p(variation**2)  # of the logarithm
    return max(1, round(draws.lognormvariate(math.log(max(mean, 1)) - variance / 2, variance**0.5)))


def _of_tokens(index: int, tokens: tuple[int, ...], output_len: int) -> WorkloadRequest:
    return WorkloadRequest(
        str(index), prompt_token_ids=tokens, input_len=len(tokens), output_len=output_len
    )


def _at_least(least: int, **numbers: int) -> None:
    for name, value in numbers.items():
        if value < least:
            raise ConfigError(f"{name} is {value}, and must be {least} or more")


# -- files ----------------------------------------------------------------------------------------


def read_sharegpt(
    path: str | Path,
    tokenizer: TextCounter,
    num: int,
    *,
    output_len: int | None = None,
    seed: int = 0,
) -> list[WorkloadRequest]:
    """Read first turns of ShareGPT conversations; each request asks for as many tokens as its
    answer has there.

    The file is a list of ``{"id", "conversations": [{"from", "value"}, …]}``. The rules are vLLM's,
    down to the order: of the conversations with two turns or more, shuffled, the first ``num`` with
    4 tokens or more each way, 1024 or fewer in the prompt and 2048 or fewer together. If there are
    fewer, random ones of them are repeated. ``output_len`` replaces the answers' lengths.

    Raises:
        WorkloadFileError: the file has another format, or no conversation fits.
    """
    conversations = _sharegpt_conversations(path)
    random.Random(seed).shuffle(conversations)
    requests: list[WorkloadRequest] = []
    for prompt, answer in conversations:
        if len(requests) >= num:
            break
        input_len = len(tokenizer.encode(prompt))
        wanted = len(tokenizer.encode(answer)) if output_len is None else output_len
        long_enough = output_len is not None or wanted >= SHAREGPT_MIN_TOKENS
        long_enough = long_enough and input_len >= SHAREGPT_MIN_TOKENS
        if not long_enough or input_len > SHAREGPT_MAX_PROMPT:
            continue
        if input_len + wanted <= SHAREGPT_MAX_TOTAL:
            index = str(len(requests))
            requests.append(
                WorkloadRequest(index, prompt=prompt, input_len=input_len, output_len=wanted)
            )
    if not requests and num:
        raise WorkloadFileError(
            path,
            f"no conversation fits: two turns, {SHAREGPT_MIN_TOKENS} or more tokens each, "
            f"{SHAREGPT_MAX_PROMPT} or fewer in the prompt, {SHAREGPT_MAX_TOTAL} in all",
        )
    return _oversampled(requests, num, seed)


def _sharegpt_conversations(path: str | Path) -> list[tuple[str, str]]:
    """Return the first two turns of each conversation that has two or more."""
    with open_text(path) as file:
        try:
            document = json.load(file)
        except RecursionError:
            raise WorkloadFileError(path, "the JSON is nested too deeply") from None
        except json.JSONDecodeError as error:
            raise WorkloadFileError(path, f"not JSON: {error.msg}", error.lineno) from None
    if not isinstance(document, list):
        raise WorkloadFileError(path, "not ShareGPT: expected a list of conversations", 1)
    found = []
    for index, entry in enumerate(document):
        turns = entry.get("conversations", []) if isinstance(entry, dict) else None
        try:
            if len(turns) < 2:  # type: ignore[arg-type]
                continue
            prompt, answer = (turn["value"] for turn in turns[:2])  # type: ignore[index]
            if not isinstance(prompt, str) or not isinstance(answer, str):
                raise TypeError
        except (TypeError, KeyError):
            raise WorkloadFileError(
                path,
                f"entry {index} is no conversation: expected "
                '{"conversations": [{"from": …, "value": text}, …]}',
            ) from None
        found.append((prompt, answer))
    return found


def read_jsonl(
    path: str | Path,
    tokenizer: TextCounter | None = None,
    num: int | None = None,
    *,
    output_len: int | None = None,
    seed: int = 0,
) -> list[WorkloadRequest]:
    """Read one JSON object a line, with ``prompt`` (text or token ids) or ``messages``.

    The tokens to ask for: ``output_len`` here, else the line's ``output_len``, ``output_tokens`` or
    ``max_tokens``, else None. Other fields are ignored; lines of vLLM's "custom" data sets fit.
    ``num``: None is all lines in their order; fewer are a random choice, still in order; more are
    all, and then random ones again. ``input_len`` needs a tokenizer, and is None for messages: only
    the model's template knows what they become.

    Raises:
        WorkloadFileError: a line has another format; says which.
    """
    requests: list[WorkloadRequest] = []
    with open_text(path) as file:
        for line, row in json_rows(path, file):
            try:
                requests.append(_from_line(str(len(requests)), row, tokenizer, output_len))
            except BadRow as problem:
                raise WorkloadFileError(path, str(problem), line) from None
    if not requests:
        raise WorkloadFileError(path, "there is no request in this file")
    if num is not None and num < len(requests):
        chosen = sorted(random.Random(seed).sample(range(len(requests)), num))
        return [replace(requests[i], request_id=str(new)) for new, i in enumerate(chosen)]
    return _oversampled(requests, len(requests) if num is None else num, seed)


def _from_line(
    index: str, row: Mapping[str, Any], tokenizer: TextCounter | None, output_len: int | None
) -> WorkloadRequest:
    if output_len is None:
        names = ("output_len", "output_tokens", "max_tokens")
        given = next((name for name in names if row.get(name) is not None), None)
        output_len = None if given is None else count(row, given, least=1)
    prompt, messages = row.get("prompt"), row.get("messages")
    if (prompt is None) == (messages is None):
        raise BadRow('expected either "prompt" or "messages"')
    if isinstance(prompt, str):
        input_len = None if tokenizer is None else len(tokenizer.encode(prompt))
        return WorkloadRequest(index, prompt=prompt, input_len=input_len, output_len=output_len)
    if messages is not None:
        ok = isinstance(messages, list) and all(
            isinstance(m, dict) and "role" in m for m in messages
        )
        if not ok or not messages:
            raise BadRow('messages is not a list of objects such as {"role": …, "content": …}')
        return WorkloadRequest(index, messages=tuple(messages), output_len=output_len)
    if not isinstance(prompt, list) or not prompt or not all(type(i) is int for i in prompt):
        raise BadRow("prompt is neither text nor a list of token ids")
    too_large = math.inf if tokenizer is None else tokenizer.vocab_size
    if strange := [token for token in prompt if not 0 <= token < too_large]:
        raise BadRow(f"prompt has the token id {strange[0]}, which the vocabulary does not")
    return replace(_of_tokens(0, tuple(prompt), 1), request_id=index, output_len=output_len)


def _oversampled(requests: list[WorkloadRequest], num: int, seed: int) -> list[WorkloadRequest]:
    """Return ``num`` requests: those given, and random repetitions of them under new ids."""
    draws = random.Random(seed)
    again = [
        replace(draws.choice(requests), request_id=str(index))
        for index in range(len(requests), num)
    ]
    return requests + again


# -- any ------------------------------------------------------------------------------------------


def load_dataset(
    source: str | Path,
    path: str | Path | None = None,
    *,
    num: int | None = None,
    tokenizer: TextCounter | None = None,
    vocab_size: int | None = None,
    input_len: int = 1024,
    output_len: int | None = None,
    range_ratio: float = 0.0,
    length_cv: float = 0.0,
    prefix_len: int | None = None,
    suffix_len: int = 256,
    num_prefixes: int = 10,
    seed: int = 0,
    speedup: float = 1.0,
    max_input_len: int | None = None,
    keep_failures: bool = False,
    avoid: Collection[int] = (),
) -> list[WorkloadRequest]:
    """Return the requests of ``source``: one of ``DATASETS``, with the file ``path`` where it needs
    one; or just a file, whose kind is detected.

    ``num``: None is 1000 random or ShareGPT requests, and all of another file; a trace gives no
    more than it has. ``output_len``: None leaves it to the file, and is 128 for random requests.
    ``vocab_size``: the tokenizer's if not given; random prompts need one of the two.
    ``prefix_len``: None is 0 for "random", and 256 for "prefix_repetition". ``speedup``,
    ``max_input_len``, ``keep_failures``: of traces, see ``traces``.

    Raises:
        ConfigError: no such data set, or an argument that it needs is missing.
        WorkloadFileError: the file has another format.
    """
    name = str(source)
    if path is None and name not in DATASETS:
        name, path = "auto", source
    if name not in DATASETS:
        raise ConfigError(f"{name!r} is no data set: choose from {', '.join(DATASETS)}")

    def needed(value: T | None, what: str) -> T:
        if value is None:
            raise ConfigError(f"the data set {name!r} needs {what}")
        return value

    def vocabulary() -> int:
        size = tokenizer.vocab_size if vocab_size is None and tokenizer else vocab_size
        return needed(size, "the size of the vocabulary, or a tokenizer")

    if name == "random":
        return random_requests(
            1000 if num is None else num,
            vocabulary(),
            input_len,
            128 if output_len is None else output_len,
            range_ratio=range_ratio,
            length_cv=length_cv,
            prefix_len=prefix_len or 0,
            seed=seed,
            avoid=avoid,
        )
    if name == "prefix_repetition":
        return prefix_repetition(
            1000 if num is None else num,
            vocabulary(),
            num_prefixes=num_prefixes,
            prefix_len=256 if prefix_len is None else prefix_len,
            suffix_len=suffix_len,
            output_len=128 if output_len is None else output_len,
            seed=seed,
            avoid=avoid,
        )
    file = needed(None if path is None else Path(path), "a file")
    if name == "auto":
        name = detect_dataset(file)
    if name == "sharegpt":
        counter = needed(tokenizer, "a tokenizer")
        wanted = 1000 if num is None else num
        return read_sharegpt(file, counter, wanted, output_len=output_len, seed=seed)
    if name in ("jsonl", "custom"):
        return read_jsonl(file, tokenizer, num, output_len=output_len, seed=seed)
    kind = {"trace": "auto", "timed_trace": "bailian"}.get(name, name)
    entries = read_trace(file, kind, limit=num, keep_failures=keep_failures)
    if output_len is not None:
        entries = [replace(entry, output_len=output_len) for entry in entries]
    return to_requests(
        entries,
        vocabulary(),
        seed=seed,
        speedup=speedup,
        max_input_len=max_input_len,
        avoid=avoid,
    )


def detect_dataset(path: str | Path) -> str:
    """Return "sharegpt", "jsonl" or "trace", by how a file begins.

    Raises:
        WorkloadFileError: it is none of them.
    """
    with open_text(path) as file:
        start = file.read(4096).lstrip()
        if start.startswith("["):  # all of it may be on one line
            return "sharegpt"
        file.seek(0)
        first, _ = peek(file)
    if not first.startswith("{"):
        detect_trace(path)
        return "trace"
    try:
        row = json_row(first)
    except BadRow as problem:
        raise WorkloadFileError(path, f"{problem}; expected one object a line", 1) from None
    if all(name in row for name in OctavoTrace.columns):
        return "trace"
    if "prompt" in row or "messages" in row:
        return "jsonl"
    reason = "neither prompt nor messages, nor the fields of a trace: " + ", ".join(
        OctavoTrace.columns
    )
    raise WorkloadFileError(path, reason, 1)
