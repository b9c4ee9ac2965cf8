"""`StatusLine`, a log line every few seconds about the engine, and one when its state changes."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from octavo.core.stats import StepStats, summed
from octavo.server.engine.generation import EngineObserver, EngineState, Generation
from octavo.server.log_lines import log_event

# The limits of steps, and the fields of StepStats that count the steps bound by them.
_BOUND_BY = {
    "memory": "num_memory_bound",
    "compute": "num_compute_bound",
    "overhead": "num_overhead_bound",
}
_LEVELS = {EngineState.RESTARTING: logging.WARNING, EngineState.FAILED: logging.ERROR}


class StatusLine(EngineObserver):
    """Counts what happens between two status lines. While nothing happens, nothing is written.

    Args:
        interval: seconds between two lines; 0 writes none.
        model: its name in the lines of a server with several models; "" of one.
    """

    def __init__(self, interval: float, model: str = ""):
        self._interval = interval
        self._model = model
        self._last_steps: dict[int | None, StepStats] = {}  # by replica
        self._num_open = 0  # requests that are not over
        self._begun: set[str] = set()  # those of them that have a token
        self._last_time = time.monotonic()
        self._start_over()

    def _start_over(self) -> None:
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._num_finished = 0
        self._num_rejected = 0
        self._last = self._stats

    @property
    def _stats(self) -> StepStats:
        """The figures after the last step, of all replicas together."""
        found = list(self._last_steps.values())
        return found[0] if len(found) == 1 else summed(found)

    async def run(self) -> None:
        """Write the lines, until cancelled."""
        while self._interval > 0:
            await asyncio.sleep(self._interval)
            self.write(time.monotonic())

    def write(self, now: float) -> None:
        """Write a line about the time since the last call, if there was anything to do."""
        elapsed, self._last_time = now - self._last_time, now
        is_busy = self._num_open or self._num_finished or self._num_rejected
        if is_busy and elapsed > 0:
            fields = self._fields(elapsed)
            self._log("status", _readable(fields), fields)
        self._start_over()

    def _fields(self, elapsed: float) -> dict[str, Any]:
        stats = self._stats
        # The last step may have been before the last request was aborted.
        is_open = self._num_open > 0
        hit_rate = None
        if stats.prefix_tokens_queried:
            hit_rate = round(stats.prefix_hit_rate, 4)
        return {
            "prompt_tps": round(self._num_prompt_tokens / elapsed, 1),
            "output_tps": round(self._num_output_tokens / elapsed, 1),
            "running": stats.num_running if is_open else 0,
            "waiting": stats.num_waiting if is_open else 0,
            "kv_usage": round(stats.kv_utilisation, 4) if is_open else 0.0,
            "prefix_hit_rate": hit_rate,
            "finished": self._num_finished,
            "preemptions": max(0, stats.num_preemptions - self._last.num_preemptions),
            "rejected": self._num_rejected,
            **self._of_drafts(),
            **self._of_limits(),
        }

    def _of_drafts(self) -> dict[str, float | None]:
        """Return the mean accepted length and the acceptance rate of drafts since the last line."""
        stats, last = self._stats, self._last
        drafts = stats.num_drafts - last.num_drafts
        drafted = stats.draft_tokens - last.draft_tokens
        accepted = stats.draft_tokens_accepted - last.draft_tokens_accepted
        if drafts <= 0 or drafted <= 0:  # a new engine begins at 0
            return {"mean_accepted_length": None, "acceptance_rate": None}
        return {
            "mean_accepted_length": round(1 + accepted / drafts, 3),
            "acceptance_rate": round(accepted / drafted, 4),
        }

    def _of_limits(self) -> dict[str, Any]:
        """Return the share of the roofline that steps since the last line reached, and the limit
        that bound most of them."""
        stats, last = self._stats, self._last
        floor = (stats.floor_seconds or 0.0) - (last.floor_seconds or 0.0)
        seconds = stats.step_seconds - last.step_seconds
        if floor <= 0 or seconds <= 0:  # no meter, or a new engine
            return {"roofline_ratio": None, "bound": None}
        bound = {
            limit: (getattr(stats, name) or 0) - (getattr(last, name) or 0)
            for limit, name in _BOUND_BY.items()
        }
        most = max(bound, key=bound.__getitem__)
        return {"roofline_ratio": round(floor / seconds, 4), "bound": most}

    def on_submitted(self, generation: Generation) -> None:
        self._num_open += 1

    def on_rejected(self, reason: str) -> None:
        self._num_rejected += 1

    def on_tokens(self, generation: Generation, num_tokens: int, gap: float | None) -> None:
        self._num_output_tokens += num_tokens
        if gap is None and generation.request.request_id not in self._begun:
            self._begun.add(generation.request.request_id)
            self._num_prompt_tokens += generation.stats.num_prompt_tokens

    def on_finished(self, generation: Generation, reason: str) -> None:
        self._num_open -= 1
        self._num_finished += 1
        self._begun.discard(generation.request.request_id)

    def on_step(self, stats: StepStats, replica: int | None = None) -> None:
        self._last_steps[replica] = stats

    def on_removed(self, replica: int) -> None:
        self._last_steps.pop(replica, None)
        self._last = self._stats
        self._log("replica removed", f"replica {replica} removed", {"replica": replica})

    def on_engine_state(self, state: EngineState, detail: str, replica: int | None = None) -> None:
        who = "engine" if replica is None else f"replica {replica}"
        message = f"{who} {state.value}" + (f": {detail}" if detail else "")
        fields: dict[str, Any] = {"state": state.value, "detail": detail}
        if replica is not None:
            fields["replica"] = replica
        self._log("engine state", message, fields, _LEVELS.get(state, logging.INFO))

    def _log(
        self, event: str, message: str, fields: dict[str, Any], level: int = logging.INFO
    ) -> None:
        """Write a line, with the model's name where there are several."""
        if self._model:
            message, fields = f"{self._model}: {message}", {"model": self._model, **fields}
        log_event(event, message, fields, level)


def _readable(fields: dict[str, Any]) -> str:
    hit_rate = fields["prefix_hit_rate"]
    parts = [
        f"{fields['prompt_tps']:.1f} prompt tokens/s",
        f"{fields['output_tps']:.1f} output tokens/s",
        f"{fields['running']} running",
        f"{fields['waiting']} waiting",
        f"KV cache {fields['kv_usage']:.1%}",
        "prefix hit rate " + ("-" if hit_rate is None else f"{hit_rate:.1%}"),
        f"{fields['finished']} finished",
    ]
    if fields["mean_accepted_length"] is not None:
        parts.append(
            f"drafts: mean accepted length {fields['mean_accepted_length']:.2f}, "
            f"{fields['acceptance_rate']:.1%} of draft tokens accepted"
        )
    if fields["bound"] is not None:
        share = f"{fields['roofline_ratio']:.0%}"
        parts.append(
            f"bound by overhead ({share} of the roofline)"
            if fields["bound"] == "overhead"
            else f"{share} of the {fields['bound']} limit"
        )
    parts += [f"{fields[name]} {name}" for name in ("preemptions", "rejected") if fields[name]]
    return "status: " + ", ".join(parts)
