"""`ResponseStore`, which keeps answers in memory for the requests that refer to them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from octavo.server.http.errors import HttpError

MAX_RESPONSES = 4096
MAX_SECONDS = 3600.0  # since its last use
_ENTRY_BYTES = 1024  # of an entry beside its texts
_ITEM_BYTES = 256  # of an id


@dataclass(frozen=True)
class KeptResponse:
    """One answer. Everything is JSON, so that it takes no more memory than it says.

    Args:
        owner: the tenant to which it belongs.
        body: the response object.
        input_items: items of its request, without those of the answers before.
        messages: of the whole conversation, with this answer and without instructions, as a chat
            has them.
        item_ids: of its output.
        is_over: whether it is not being made any more.
    """

    id: str
    owner: str
    body: bytes
    input_items: bytes
    messages: bytes
    item_ids: Sequence[str]
    is_over: bool = True
    used_at: float = 0.0

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        texts = len(self.body) + len(self.input_items) + len(self.messages)
        return _ENTRY_BYTES + _ITEM_BYTES * len(self.item_ids) + texts


class ResponseStore:
    """Keeps answers, up to a number, a time since their last use and an amount of memory: the least
    recently used go first, and none is found by another tenant.

    Args:
        max_bytes: memory of all; 0 keeps none.
        clock: for tests.
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic):
        self._max_bytes = max_bytes
        self._clock = clock
        self._kept: OrderedDict[str, KeptResponse] = OrderedDict()  # the least recently used first
        self._by_item: dict[str, str] = {}  # ids of responses by those of their items
        self.num_bytes = 0

    @property
    def keeps_any(self) -> bool:
        return self._max_bytes > 0

    def keep(self, response: KeptResponse) -> None:
        """Keep an answer, in place of what was kept of it before, unless it alone is too large."""
        if response.id in self._kept:
            self._drop(response.id)
        if response.num_bytes > self._max_bytes:
            return
        self._kept[response.id] = replace(response, used_at=self._clock())
        self._by_item |= dict.fromkeys(response.item_ids, response.id)
        self.num_bytes += response.num_bytes
        self._forget_old()

    def find(self, response_id: str, owner: str) -> KeptResponse:
        """Return an answer.

        Raises:
            HttpError: 404, it is not kept, or not any more, or not for this tenant.
        """
        self._forget_old()
        response = self._kept.get(response_id)
        if response is None or response.owner != owner:
            raise HttpError(
                404,
                f"Response with id {response_id[:80]!r} not found: it was not kept, or not any "
                "more.",
                type="invalid_request_error",
            )
        self._kept[response_id] = replace(response, used_at=self._clock())
        self._kept.move_to_end(response_id)
        return response

    def of_item(self, item_id: str, owner: str) -> KeptResponse | None:
        """Return the answer that has an item in its output; None if it is not kept."""
        response = self._kept.get(self._by_item.get(item_id, ""))
        return response if response is not None and response.owner == owner else None

    def forget(self, response_id: str, owner: str) -> None:
        """Forget an answer; raises as `find` does."""
        self.find(response_id, owner)
        self._drop(response_id)

    def _forget_old(self) -> None:
        too_old = self._clock() - MAX_SECONDS
        while self._kept:
            oldest = next(iter(self._kept.values()))
            has_room = self.num_bytes <= self._max_bytes and len(self._kept) <= MAX_RESPONSES
            if has_room and oldest.used_at >= too_old:
                return
            self._drop(oldest.id)

    def _drop(self, response_id: str) -> None:
        response = self._kept.pop(response_id)
        for item_id in response.item_ids:
            del self._by_item[item_id]
        self.num_bytes -= response.num_bytes
