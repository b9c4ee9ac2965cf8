"""What a sampler needs to know of a request, be it the native one or that in Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.token_mask import Bits

# A lower temperature is treated as 0.
GREEDY_TEMPERATURE = 1e-5


@dataclass(slots=True)
class SamplingRow:
    """What one row of logits needs to become a token; built by the runner from a request."""

    params: SamplingParams
    seed: int  # 64 bits; the request's own, or drawn for it by the front end
    sample_index: int  # which of the n samples this is
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]  # the token to sample has position len(output_token_ids)
    bits: Bits | None = None  # which tokens may come; None: all

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature < GREEDY_TEMPERATURE

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    def bitmask(self) -> Bits | None:
        return self.bits

    @property
    def is_constrained(self) -> bool:
        """Whether anything but the model has a say in this row's logits."""
        params = self.params
        return self.bits is not None or bool(params.logit_bias) or params.has_penalties


def sampling_row(request: Request) -> SamplingRow:
    """A request as it is now, in a row of its own."""
    return SamplingRow(
        params=request.params,
        seed=request.seed,
        sample_index=request.sample_index,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids,
        bits=request.bitmask(),
    )
