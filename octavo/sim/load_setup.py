"""Makes the prompts of a simulation from the settings of a workload, and describes what is typical
of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from octavo.base.errors import ConfigError
from octavo.sim.prompts import PromptSpec, as_conversations, prompts_of_requests, prompts_of_trace
from octavo.sim.settings import ClientSettings
from octavo.workload.plan import LoadPlan, PromptMaker, create_requests
from octavo.workload.settings import Workload
from octavo.workload.traces import KINDS, read_trace

_TRACES = {"trace": "auto", "timed_trace": "bailian", **{kind: kind for kind in KINDS}}


def prompts_of_workload(
    workload: Workload, clients: ClientSettings, tokenizer: PromptMaker
) -> list[PromptSpec]:
    """Return the prompts of a data set or a trace, as the clients send them."""
    kind = _TRACES.get(workload.dataset_name)
    if clients.trace is not None:
        prompts = _prompts_of_trace_file(clients.trace, "auto", workload)
    elif kind is None:
        prompts = prompts_of_requests(create_requests(workload, tokenizer))
    elif workload.dataset_path is None:
        raise ConfigError(f"the data set {workload.dataset_name!r} needs a --dataset-path")
    else:
        prompts = _prompts_of_trace_file(workload.dataset_path, kind, workload)
    if clients.turns > 1:
        prompts = as_conversations(prompts, clients.turns, clients.think_time)
    if clients.patience is not None:
        prompts = [replace(prompt, patience_s=clients.patience) for prompt in prompts]
    return prompts


def _prompts_of_trace_file(path: str, kind: str, workload: Workload) -> list[PromptSpec]:
    entries = read_trace(path, kind, limit=workload.num_prompts)
    if workload.output_len is not None:
        entries = [replace(entry, output_len=workload.output_len) for entry in entries]
    return prompts_of_trace(entries, speedup=workload.speedup, max_input_len=workload.max_input_len)


class VocabularySize:
    """Stands in for the tokenizer of a model that is not here: only the number of its tokens is
    known, so that prompts can be made of token ids, and no text can be encoded."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def is_special(self, token_id: int) -> bool:
        return False

    def encode(self, text: str) -> Sequence[int]:
        raise ConfigError(
            "only the model's tokenizer can count the tokens of a text: give a MODEL that is here, "
            "or a data set of token ids, or a trace"
        )


class TypicalLoad(NamedTuple):
    """The mean of a load, by which a layout is chosen for it.

    Args:
        input_len, output_len: mean tokens of prompts, without what conversations repeat, and of
            answers.
        rate: requests a second; None where they are all sent at once, or each when another ends.
        concurrency: the most requests in flight; without a rate, how many there are.
    """

    input_len: int
    output_len: int
    rate: float | None
    concurrency: int | None


def typical_load(prompts: Sequence[PromptSpec], plan: LoadPlan) -> TypicalLoad:
    """Return the means of prompts that are sent by a plan."""
    input_len = max(1, round(sum(prompt.input_len for prompt in prompts) / len(prompts)))
    output_len = max(1, round(sum(prompt.output_len for prompt in prompts) / len(prompts)))
    seconds = max(plan.times, default=0.0) if plan.times is not None else 0.0
    if seconds:
        return TypicalLoad(input_len, output_len, len(prompts) / seconds, plan.max_concurrency)
    at_once = min(len(prompts), plan.max_concurrency or len(prompts))
    return TypicalLoad(input_len, output_len, None, at_once)
