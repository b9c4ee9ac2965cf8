"""Clients that send requests in an open or a closed loop, in conversations, and with limited
patience.

The rules are those of the load generator (`octavo.bench.serving.load`), so that a simulated run and
a measured one of the same plan are the same experiment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from octavo.base.errors import ConfigError
from octavo.measure.request_record import RequestRecord
from octavo.sim.agenda import Agenda
from octavo.sim.prompts import PromptSpec
from octavo.sim.request import SimRequest
from octavo.workload.plan import LoadPlan


class Clients:
    """Sends requests by a plan.

    ``plan.times`` are those of the requests that follow no other. A request that follows another is
    sent when that one has ended, and never if that one was not sent.

    Args:
        send, abort: start and stop serving a request.
        on_end: called when a client has hung up; it must call ``ended``, as for every end.
    """

    def __init__(
        self,
        prompts: Sequence[PromptSpec],
        plan: LoadPlan,
        agenda: Agenda,
        send: Callable[[SimRequest], None],
        abort: Callable[[SimRequest], None],
        on_end: Callable[[SimRequest], None],
    ):
        self.requests: list[SimRequest] = []  # in the order of sending
        self._plan = plan
        self._agenda = agenda
        self._send_to_fleet = send
        self._abort = abort
        self._on_end = on_end
        self._firsts = deque(prompt for prompt in prompts if prompt.follows is None)
        self._followers = _by_predecessor(prompts)
        self._waiting: deque[tuple[PromptSpec, list[int], float]] = deque()  # for a place; see _due
        self._num_places = plan.max_concurrency

    def start(self) -> None:
        """Schedule the requests whose time of sending is known."""
        times = self._plan.times
        if times is None:
            self._agenda.at(0.0, self._fill_places)
            return
        if len(times) != len(self._firsts):
            raise ConfigError(f"the plan has {len(times)} times for {len(self._firsts)} requests")
        for prompt, time in zip(self._firsts, times, strict=True):
            self._plan_for(time, prompt, [])

    def ended(self, request: SimRequest) -> None:
        """Note that a request is over: its place is free, and its client may send a next turn."""
        if self._num_places is not None:
            self._num_places += 1
        for prompt in self._followers.get(request.prompt.request_id, ()):
            before = request.token_ids + request.output if prompt.goes_on else []
            self._plan_for(self._agenda.now + prompt.think_s, prompt, before)
        request.token_ids, request.output = [], []
        self._fill_places()

    def _plan_for(self, moment: float, prompt: PromptSpec, before: list[int]) -> None:
        """Schedule a request, unless that is too late; ``before``: tokens of earlier turns."""
        if not self._is_over(moment):
            self._agenda.at(moment, lambda: self._due(prompt, before, moment))

    def _is_over(self, moment: float) -> bool:
        """True if nothing more is sent at a moment."""
        return self._plan.duration_s is not None and moment >= self._plan.duration_s

    def _due(self, prompt: PromptSpec, before: list[int], scheduled: float) -> None:
        if self._num_places == 0:
            self._waiting.append((prompt, before, scheduled))
        else:
            self._send(prompt, before, scheduled)

    def _fill_places(self) -> None:
        """Send requests that wait for a place, as long as there are places."""
        now = self._agenda.now
        while self._waiting and self._num_places != 0:
            self._send(*self._waiting.popleft())
        if self._plan.is_open_loop or self._is_over(now):
            return
        while self._firsts and self._num_places != 0:
            self._send(self._firsts.popleft(), [], now)

    def _send(self, prompt: PromptSpec, before: list[int], scheduled: float) -> None:
        if self._num_places is not None:
            self._num_places -= 1
        now = self._agenda.now
        token_ids = list(before)
        for piece in prompt.pieces:
            token_ids += piece
        record = RequestRecord(
            prompt.request_id,
            scheduled,
            sent=now,
            ended=now,
            queue_time=now - scheduled,
            connected=now,
            prompt_tokens=len(token_ids),
            output_tokens_from="usage",
        )
        request = SimRequest(prompt, len(self.requests), token_ids, record)
        self.requests.append(request)
        self._send_to_fleet(request)
        if prompt.patience_s is not None:
            self._agenda.at(now + prompt.patience_s, lambda: self._hang_up(request))

    def _hang_up(self, request: SimRequest) -> None:
        if request.is_over:
            return
        self._abort(request)
        patience = request.prompt.patience_s
        request.fail(self._agenda.now, f"the client hung up after {patience:g} s")
        self._on_end(request)


def _by_predecessor(prompts: Sequence[PromptSpec]) -> dict[str, list[PromptSpec]]:
    """Return the prompts that follow each request. ConfigError if one follows a missing request."""
    followers: dict[str, list[PromptSpec]] = {prompt.request_id: [] for prompt in prompts}
    for prompt in prompts:
        if prompt.follows is not None:
            if prompt.follows not in followers:
                raise ConfigError(
                    f"request {prompt.request_id} follows {prompt.follows}, which does not exist"
                )
            followers[prompt.follows].append(prompt)
    return followers
