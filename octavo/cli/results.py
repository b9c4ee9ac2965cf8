"""Answers as JSON, and as the line of figures that follows an answer on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from octavo.base.json_values import finite_or_none

if TYPE_CHECKING:
    from octavo.core.sampling_params import SamplingParams
    from octavo.core.stats import DraftStats
    from octavo.serving.outputs import (
        CompletionOutput,
        PositionLogprobs,
        RequestMetrics,
        RequestOutput,
    )


def request_json(
    prompt: str, output: RequestOutput, params: SamplingParams, speculation: str | None = None
) -> dict[str, Any]:
    """One element of ``outputs`` in the JSON of ``octavo generate``.

    ``prompt`` is what the user wrote; the token ids include what the chat template made of it.
    ``speculation`` is the method of speculative decoding, None without it.
    """
    document: dict[str, Any] = {
        "prompt": prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "outputs": [_completion_json(completion, params.logprobs) for completion in output.outputs],
        "metrics": _metrics_json(output.metrics, speculation),
    }
    if output.prompt_logprobs is not None:
        document["prompt_logprobs"] = _logprobs_json(
            output.prompt_logprobs, output.prompt_token_ids, params.prompt_logprobs
        )
    if output.error is not None:
        document["error"] = output.error
    return document


def summary(output: RequestOutput) -> str:
    """``31 prompt tokens, 64 output tokens (length), TTFT 312 ms, 21.3 tokens/s``."""
    metrics = output.metrics
    num_output_tokens = sum(len(completion.token_ids) for completion in output.outputs)
    cached = f" ({metrics.num_cached_tokens} cached)" if metrics.num_cached_tokens else ""
    reasons = ", ".join(sorted({c.finish_reason for c in output.outputs if c.finish_reason}))
    parts = [
        f"{len(output.prompt_token_ids)} prompt tokens{cached}",
        f"{num_output_tokens} output tokens" + (f" ({reasons})" if reasons else ""),
    ]
    if metrics.ttft is not None:
        parts.append(f"TTFT {metrics.ttft * 1e3:,.0f} ms")
    rate = metrics.decode_tps or (num_output_tokens / metrics.e2e if metrics.e2e else None)
    if rate is not None:
        parts.append(f"{rate:,.1f} tokens/s")
    drafts = metrics.drafts
    if drafts.num_drafts:
        parts.append(f"{drafts.num_accepted} of {drafts.num_tokens} drafted tokens accepted")
    return ", ".join(parts)


def _completion_json(completion: CompletionOutput, num_top: int | None) -> dict[str, Any]:
    positions = completion.logprobs
    return {
        "index": completion.index,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "cumulative_logprob": finite_or_none(completion.cumulative_logprob),
        "logprobs": positions and _logprobs_json(positions, completion.token_ids, num_top),
    }


def _logprobs_json(
    positions: Sequence[PositionLogprobs | None], token_ids: Sequence[int], num_top: int | None
) -> list[dict[str, Any] | None]:
    """One entry a position; None where a token has no predecessor (the first of a prompt)."""
    return [
        None if position is None else _position_json(position, token_id, num_top or 0)
        for position, token_id in zip(positions, token_ids, strict=True)
    ]


def _position_json(position: PositionLogprobs, token_id: int, num_top: int) -> dict[str, Any]:
    """The token that is there, and the ``num_top`` most likely ones, which may include it."""
    own = position[token_id]
    ranked = sorted(position.items(), key=lambda item: -item[1].logprob)[:num_top]
    return {
        "token_id": token_id,
        "token": own.decoded_token,
        "logprob": finite_or_none(own.logprob),
        "rank": own.rank,
        "top": [
            {"token_id": other, "token": it.decoded_token, "logprob": finite_or_none(it.logprob)}
            for other, it in ranked
        ],
    }


def _metrics_json(metrics: RequestMetrics, speculation: str | None) -> dict[str, Any]:
    def milliseconds(seconds: float | None) -> float | None:
        return None if seconds is None else seconds * 1e3

    return {
        "ttft_ms": milliseconds(metrics.ttft),
        "tpot_ms": milliseconds(metrics.tpot),
        "e2e_ms": milliseconds(metrics.e2e),
        "prefill_tps": metrics.prefill_tps,
        "decode_tps": metrics.decode_tps,
        "num_cached_tokens": metrics.num_cached_tokens,
        "miss_reason": metrics.miss_reason,
        "speculation": None if speculation is None else _drafts_json(speculation, metrics.drafts),
    }


def _drafts_json(method: str, drafts: DraftStats) -> dict[str, Any]:
    return {
        "method": method,
        "drafts": drafts.num_drafts,
        "drafted": drafts.num_tokens,
        "accepted": drafts.num_accepted,
        "acceptance_rate": drafts.acceptance_rate,
        "mean_accepted_length": drafts.mean_accepted_length,
        "accepted_by_position": list(drafts.accepted_by_position),
    }
