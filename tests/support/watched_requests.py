"""Requests that tell how many of their tokens somebody reads."""

from __future__ import annotations

from octavo import SamplingParams
from octavo.core.request import Request


class Watched(list):
    """A list that counts how many of its entries are read."""

    num_read = 0

    def __getitem__(self, index):
        found = super().__getitem__(index)
        self.num_read += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self):
        self.num_read += len(self)
        return super().__iter__()


def read_in_a_step(request: Request, write) -> int:
    """Tokens of a request that are read for the next one, when those before have been."""
    write(request)
    request.token_ids.append(3)
    request.token_ids.num_read = 0
    write(request)
    return request.token_ids.num_read


def requests_of(*lengths: int) -> list[Request]:
    """Requests with penalties, whose answers have so many tokens already, of fifty different."""
    params = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5, max_tokens=None)
    requests = []
    for length in lengths:
        request = Request("r", [1, 2, 3], params, 0.0)
        request.token_ids = Watched([1, 2, 3, *(token % 50 for token in range(length))])
        requests.append(request)
    return requests
