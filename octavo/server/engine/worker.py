"""The engine process, in which one thread steps the engine and another one receives messages.

    python -m octavo.server.engine.worker CONNECTION RECORD LOG_FORMAT

``CONNECTION`` and ``RECORD`` are file descriptors, inherited from the server: one end of a socket
pair, and the memory of an `InFlightRecord`. When the other end closes, the process ends at once,
whatever it is doing: the server has gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from octavo import hub
from octavo.base.errors import (
    ENDINGS,
    ConfigError,
    EngineError,
    OctavoError,
    PeerEndedError,
    QueueFullError,
)
from octavo.core.block_store import following_keys, root_key
from octavo.core.engine import EngineStep
from octavo.core.engine_snapshot import EngineSnapshot
from octavo.core.executor import Executor
from octavo.core.request import FinishReason
from octavo.core.sampling_params import SamplingParams
from octavo.core.step_meter import CountedExperts, StepMeter, SwitchableMeter
from octavo.cost.loaded_model import live_rank_model
from octavo.server.engine.generation import EngineFacts, GenerationStats
from octavo.server.engine.in_flight_record import InFlightRecord, RecordedExecutor
from octavo.server.engine.wire import (
    Message,
    MessageDecoder,
    delta_to_list,
    encode_message,
    error_to_message,
    record_to_list,
    stats_to_list,
)
from octavo.server.log_lines import create_formatter
from octavo.serving.load import LoadedEngine, load_engine
from octavo.serving.loop import EngineLoop
from octavo.serving.mask_preparation import MaskPreparation
from octavo.serving.outputs import Delta
from octavo.serving.text_engine import (
    OutputSoFar,
    PreparedMask,
    SampleGroup,
    TextEngine,
    metrics_of,
)
from octavo.settings.engine import EngineArgs
from octavo.system import machine
from octavo.system.child_process import end_with_parent
from octavo.system.machine import without_blas_threads

if TYPE_CHECKING:
    from octavo.offload.open_peers import Transfer
    from octavo.offload.peer_storage import PeerStorage
    from octavo.offload.transfer_links import TransferLinks

_log = logging.getLogger("octavo")

# Environment: misbehaviour for tests, as JSON; see octavo/executor/faulty.py.
FAULTS_VARIABLE = "OCTAVO_FAULTS"

# After so many requests in a row that failed, the engine checks itself with one of its own.
_SUSPICIOUS_ERRORS = 8
_PROBE = "octavo-probe"
_BEFORE_ALL = -(2**31)  # a priority


class EngineWorker:
    """An engine that follows the messages that it receives, and reports by ``send``.

    Args:
        engine: over a `RecordedExecutor` with the same record.
        record: memory in which it notes the requests that it computes.
        meter: the engine's, which a ``meter`` message switches on.
        peers: the KV of other replicas, where prompts are computed apart.
        links: to these, where they may be on other machines.
        clock_lead: seconds by which the engine's clock is ahead of the server's, at most.

    Raises:
        EngineError: from ``run``, when the engine can serve nothing any more.
    """

    def __init__(
        self,
        engine: TextEngine,
        record: InFlightRecord,
        meter: SwitchableMeter,
        send: Callable[[Message], None],
        peers: PeerStorage | None = None,
        links: TransferLinks | None = None,
        *,
        clock_lead: float = 0.0,
    ):
        self._engine = engine
        self._clock_lead = clock_lead
        self._peers, self._links = peers, links
        if links is not None:
            links.when_lost(lambda replica: self._loop.tell(partial(self._ask_again, replica)))
        self._to_hand_over: set[str] = set()  # unfinished requests that others go on with
        self._meter = meter
        self._flight_record = record
        self._loop = EngineLoop(engine, self._deliver)
        self._send = send
        self._groups: dict[str, SampleGroup] = {}  # unfinished requests, except the probe
        self._waiting: dict[str, str] = {}  # ids of first samples not computed yet, to requests
        self._preparation = MaskPreparation(engine.grammars)
        self._preparing: dict[str, Message] = {}  # requests that are not added yet
        self._num_errors_in_a_row = 0
        self._snapshot: EngineSnapshot | None = None  # None while snapshots are off
        self._snapshot_is_scheduled = False
        self._end: EngineError | None = None

    def receive(self, message: Message) -> None:
        """Handle a message between two steps. May be called from any thread."""
        self._loop.tell(partial(self._obey, message))

    def end(self, error: EngineError) -> None:
        """Have ``run`` end with an error that is not of a step. May be called from any thread."""
        self._end = error
        self._loop.stop()

    def run(self) -> None:
        """Step the engine until a ``stop`` message comes."""
        try:
            self._loop.run()
        finally:
            if self._end is not None:
                raise self._end

    # -- in ----------------------------------------------------------------------------------

    def _obey(self, message: Message) -> None:
        match message["op"]:
            case "add":
                self._add(message)
            case "abort":
                self._abort(message["id"])
            case "peer_ended":
                if self._peers is not None:
                    self._peers.peer_ended(message["replica"])
            case "invite":
                self._invite(message["replica"])
            case "connect":
                if self._links is not None:
                    self._links.connect(message["replica"], message["ticket"])
            case "release":
                self._engine.end_isolation(message["id"])
            case "meter":
                self._measure_steps(message["facts"])
            case "snapshots":
                self._enable_snapshots(message["is_enabled"])
            case "ping":
                # What a message was on its way makes a lead too long, never too short.
                lead = time.monotonic() - message["now"]
                self._clock_lead = min(self._clock_lead, lead)
                self._send({"ev": "pong", "number": message["number"], "record": self._record()})
            case "stop":
                self._loop.stop()

    def _enable_snapshots(self, is_enabled: bool) -> None:
        self._snapshot = EngineSnapshot(self._engine.engine) if is_enabled else None
        self._send_snapshot()

    def _send_snapshot(self) -> None:
        """Send a picture of the engine as it stands, if snapshots are enabled."""
        if self._snapshot is not None:
            self._send({"ev": "snapshot", "snapshot": self._snapshot.picture()})

    def _schedule_snapshot(self) -> None:
        """Send a snapshot when the next one is due, if no step will do so because nothing runs.

        A request that comes meanwhile does not wait for it.
        """
        if (
            self._snapshot is None
            or self._snapshot_is_scheduled
            or self._engine.has_unfinished_requests
        ):
            return
        self._snapshot_is_scheduled = True
        seconds = self._snapshot.seconds_to_picture
        timer = threading.Timer(seconds, self._loop.tell, [self._send_snapshot_if_idle])
        timer.daemon = True
        timer.start()

    def _send_snapshot_if_idle(self) -> None:
        self._snapshot_is_scheduled = False
        if not self._engine.has_unfinished_requests:
            self._send_snapshot()

    def _measure_steps(self, facts: dict[str, Any]) -> None:
        # Not needed until the server is ready, and so not to be waited for before.
        from octavo.cost.roofline_meter import RooflineMeter
        from octavo.cost.step_facts import StepFacts

        meter: StepMeter = RooflineMeter(StepFacts.of_json(facts).step_model())
        probe = self._engine.engine.executor.probe()
        self._meter.switch_to(CountedExperts(meter, probe) if probe.expert_figures() else meter)

    def _add(self, message: Message) -> None:
        request_id: str = message["id"]
        if "kv" in message and self._peers is not None:
            self._expect(message)
        try:
            params = SamplingParams(**message["params"])
            bad_words = tuple(map(tuple, message["bad_words"]))
            prepare = partial(self._engine.prepare_mask, params, bad_words, message["ids"])
            mask = None if self._engine.takes_long_to_prepare(params) else prepare()
        except ENDINGS:
            raise
        except BaseException as error:
            self._refuse(request_id, error)
            return
        if mask is not None:
            self._add_prepared(message, params, mask)
            return
        # What may take a second is not for this thread. Others may overtake the request meanwhile.
        self._preparing[request_id] = message

        def done(mask: PreparedMask | BaseException) -> None:
            self._loop.tell(partial(self._end_preparing, message, params, mask))

        self._preparation.submit(params, message["tenant"], prepare, done)

    def _end_preparing(
        self, message: Message, params: SamplingParams, mask: PreparedMask | BaseException
    ) -> None:
        request_id = message["id"]
        if self._preparing.get(request_id) is not message:
            return  # it was aborted
        del self._preparing[request_id]
        if isinstance(mask, BaseException):
            self._refuse(request_id, mask)
        else:
            self._add_prepared(message, params, mask)

    def _add_prepared(self, message: Message, params: SamplingParams, mask: PreparedMask) -> None:
        request_id: str = message["id"]
        self._flight_record.write([request_id])
        try:
            group = self._engine.add(
                request_id,
                None,
                message["ids"],
                params,
                priority=message["priority"],
                cache_salt=message["salt"],
                tenant=message["tenant"],
                weight=message["weight"],
                isolated=message["isolated"],
                arrival_time=message["arrival"] + self._clock_lead,
                prepared_mask=mask,
                resumed=[OutputSoFar(*each) for each in message.get("resumed", ())],
            )
        except ENDINGS:
            raise
        except BaseException as error:
            self._refuse(request_id, error)
            return
        self._groups[request_id] = group
        if message.get("hands_over"):
            self._to_hand_over.add(request_id)
        self._waiting[group.samples[0].request.request_id] = request_id

    def _refuse(self, request_id: str, error: BaseException) -> None:
        if not isinstance(error, OctavoError):
            _log.error("request %s could not be added", request_id, exc_info=error)
        self._send({"ev": "refused", "id": request_id, **error_to_message(error)})

    def _expect(self, message: Message) -> None:
        """Wait, when its turn comes, for the KV of a prompt that another replica has computed."""
        kv, size = message["kv"], self._engine.engine.scheduler.block_manager.block_size
        keys = following_keys(root_key(message["salt"]), message["ids"][: kv["tokens"]], size)
        assert self._peers is not None
        self._peers.expect(kv["replica"], keys)

    def _invite(self, replica: int) -> None:
        """Have a replica connect, to which this one passes KV on."""
        ticket = None if self._links is None else self._links.invite(replica)
        if ticket is not None:
            self._send({"ev": "invited", "replica": replica, "ticket": ticket})

    def _ask_again(self, replica: int) -> None:
        """Ask for another link to a replica, since the last one has ended."""
        self._send({"ev": "unlinked", "replica": replica})

    def _hand_over(self) -> None:
        """Give up requests whose samples have all begun, and save their KV for who goes on."""
        for request_id in list(self._to_hand_over):
            group = self._groups.get(request_id)
            if group is None:  # it is over
                self._to_hand_over.discard(request_id)
                continue
            requests = [sample.request for sample in group.samples]
            if all(each.is_finished or each.num_output_tokens for each in requests):
                self._to_hand_over.discard(request_id)
                del self._groups[request_id]
                num_saved = self._engine.hand_over(request_id)
                message = {"ev": "handed_over", "id": request_id, "tokens": num_saved}
                self._send({**message, "record": self._record()})

    def _abort(self, request_id: str) -> None:
        self._preparing.pop(request_id, None)
        group = self._groups.pop(request_id, None)
        if group is not None and self._engine.abort(request_id):
            self._waiting.pop(group.samples[0].request.request_id, None)
            if not self._engine.has_unfinished_requests:  # no step will report that it has gone
                self._send({"ev": "idle", "record": self._record()})
                self._schedule_snapshot()

    # -- out ---------------------------------------------------------------------------------

    def _record(self) -> tuple[Any, ...]:
        """Return the statistics of the engine between two steps, as a list."""
        return record_to_list(self._engine.engine.stats())

    def _deliver(self, deltas: list[Delta], step: EngineStep) -> None:
        self._report(deltas, step)
        if self._to_hand_over:
            self._hand_over()
        self._check_health(deltas)

    def _report(self, deltas: list[Delta], step: EngineStep) -> None:
        begun: list[str] = []
        if self._waiting:
            for item in step.batch.items:
                request_id = self._waiting.pop(item.request.request_id, None)
                if request_id is not None:
                    begun.append(request_id)
        entries: list[list[Any]] = []
        stats: dict[str, tuple[Any, ...]] = {}
        prompt_logprobs: dict[str, Any] = {}
        for delta in deltas:
            name = delta.request_id
            group = self._groups.get(name)
            if group is None:  # the probe
                continue
            entries.append(delta_to_list(name, delta))
            if delta.prompt_logprobs:
                prompt_logprobs.setdefault(name, []).extend(delta.prompt_logprobs)
            request = group.sample(delta.index).request
            if request.num_output_tokens <= len(delta.token_ids) or group.is_finished:
                stats[name] = _stats(group)
        for name in stats:
            if self._groups[name].is_finished:
                del self._groups[name]
        message = {
            "ev": "step",
            "time": self._engine.engine.clock.now() - self._clock_lead,
            "record": record_to_list(step.stats),
            "begun": begun,
            "deltas": entries,
            "stats": stats,
        }
        if self._snapshot is not None:
            message["snapshot"] = self._snapshot.at_step(step)
        if prompt_logprobs:
            message["prompt_logprobs"] = prompt_logprobs
        self._send(message)
        self._schedule_snapshot()

    # -- health ------------------------------------------------------------------------------

    def _check_health(self, deltas: list[Delta]) -> None:
        """Tell bad requests from a broken engine: when only errors come, try a good request.

        A device that is broken makes every request fail on its own, for ever; then it is better to
        start a new engine.
        """
        for delta in deltas:
            has_failed = delta.finish_reason == FinishReason.ERROR.value
            if delta.request_id == _PROBE and delta.finish_reason is not None:
                if has_failed:
                    raise EngineError("the engine fails every request, its own too")
                self._num_errors_in_a_row = 0
            elif has_failed:
                self._num_errors_in_a_row += 1
            elif delta.token_ids:
                self._num_errors_in_a_row = 0
        if self._num_errors_in_a_row >= _SUSPICIOUS_ERRORS and _PROBE not in self._engine.groups:
            self._loop.carry_out(self._probe)

    def _probe(self) -> None:
        token_id = next(iter(self._engine.eos_token_ids), 0)
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        with contextlib.suppress(QueueFullError):  # then after the next step
            self._engine.add(_PROBE, None, [token_id], params, priority=_BEFORE_ALL)


def _stats(group: SampleGroup) -> tuple[Any, ...]:
    """Return the statistics of a request as a list. The times of its end are None before it."""
    metrics, first = metrics_of(group), group.samples[0].request.stats
    prefill = decode = None
    if first.first_token_time is not None and first.first_scheduled_time is not None:
        prefill = first.first_token_time - first.first_scheduled_time
    is_over = group.is_finished
    if is_over and metrics.e2e is not None and metrics.ttft is not None:
        decode = metrics.e2e - metrics.ttft
    return stats_to_list(
        GenerationStats(
            num_prompt_tokens=len(group.prompt_token_ids),
            num_cached_tokens=metrics.num_cached_tokens,
            miss_reason=metrics.miss_reason,
            num_preemptions=metrics.num_preemptions,
            num_draft_tokens=metrics.drafts.num_tokens,
            num_accepted_tokens=metrics.drafts.num_accepted,
            queue_time=metrics.queue_time,
            ttft=metrics.ttft,
            tpot=metrics.tpot if is_over else None,
            e2e=metrics.e2e if is_over else None,
            prefill_time=prefill,
            decode_time=decode,
        )
    )


# -- the process -----------------------------------------------------------------------------


class Connection(Protocol):
    """The worker's end of what connects it with the server, as a socket has it."""

    def recv(self, num_bytes: int, /) -> bytes:
        """Wait for some bytes; none are the end."""
        ...

    def sendall(self, data: bytes, /) -> None:
        """Send bytes, from any thread that is not the one that receives."""
        ...


def main(connection_fd: int, record_fd: int, log_format: str) -> int:
    """Serve the other end of a socket; returns the exit status."""
    prepare_process(log_format)
    connection = socket.socket(fileno=connection_fd)
    connection.setblocking(True)
    return serve(connection, InFlightRecord.open(record_fd))


def prepare_process(log_format: str) -> None:
    """Have this process log, leave signals to its parent, and end with it."""
    # Where the system cannot do that, `_pass_on` does it, as soon as a thread can run.
    end_with_parent()
    faulthandler.enable()  # SIGABRT, with which the server ends a process that hangs, shows where
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which tells us
    handler = logging.StreamHandler()
    handler.setFormatter(create_formatter(log_format))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)


def serve(connection: Connection, record: InFlightRecord, own_host: str = "") -> int:
    """Load the engine that the first message asks for, and serve the connection until its end;
    returns the exit status.

    ``own_host``: the address of this machine for processes on others, if it has any.
    """
    messages = _receive(connection)

    def send(message: Message) -> None:
        connection.sendall(encode_message(message))

    start = next(messages, None)
    if start is None:  # the server ended before it had said anything
        return 0
    clock_lead = _lead_of_clock(start)
    if start["cpus"]:
        with contextlib.suppress(OSError):  # some of them are off by now: it runs anywhere
            os.sched_setaffinity(0, start["cpus"])
    with without_blas_threads():
        import numpy  # noqa: F401
    meter = SwitchableMeter()
    made: Future[EngineWorker] = Future()
    threading.Thread(target=_pass_on, args=(messages, made), daemon=True).start()
    links = _transfer_links(start, own_host)
    try:
        _check_model(start)
        loaded = _load(start["args"], record, meter, links or _transfer_files(start))
    except OctavoError as error:
        send({"ev": "failed", **error_to_message(error)})
        return 1
    worker = EngineWorker(
        *(loaded.text_engine, record, meter, send, loaded.peers, links), clock_lead=clock_lead
    )
    loaded.ranks.when_one_ends(worker.end)
    loaded.text_engine.grammars.tries_small = True  # clients may want to do harm
    made.set_result(worker)
    gc.collect()
    gc.freeze()  # the model is for ever: no collection has to look at it again
    facts = _facts_of(loaded, start["args"]["activations"])
    send({"ev": "ready", "facts": dataclasses.asdict(facts)})
    try:
        worker.run()
    except PeerEndedError as error:
        _log.error("%s", error)
        return 1
    return 0


def _lead_of_clock(start: Message) -> float:
    """Return by how many seconds the clock here is ahead of the server's: 0 on its machine."""
    clock = start.get("clock")
    if clock is None or clock["boot"] == machine.boot_id():
        return 0.0
    return time.monotonic() - float(clock["now"])


def _receive(connection: Connection) -> Iterator[Message]:
    """Yield messages until the other end closes."""
    decoder = MessageDecoder()
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(1 << 16):
            yield from decoder.feed(data)


def _pass_on(messages: Iterator[Message], worker: Future[EngineWorker]) -> None:
    for message in messages:
        worker.result().receive(message)
    os._exit(0)  # the server has gone, maybe while the model was still being loaded


def _check_model(start: Message) -> None:
    """Raise ConfigError if this machine has another model than the server, which may be on another
    machine."""
    if "model" not in start:
        return
    from octavo.links.facts import difference
    from octavo.models.model_content import fingerprint

    path = hub.resolve(start["args"]["model"])
    if (why := difference(fingerprint(path), start["model"])) is not None:
        raise ConfigError(
            f"{os.uname().nodename} has another model at {path} than the server: {why}; put the "
            "server's there"
        )


def _transfer_links(start: Message, own_host: str) -> TransferLinks | None:
    """Return the links through which KV is passed on, if the message ``start`` wants them."""
    if "links" not in start:
        return None
    from octavo.offload.transfer_links import TransferLinks

    links = start["links"]
    host = own_host if links["computes_prompts"] else None
    return TransferLinks(host, links["peers"], links["bytes"])


def _transfer_files(start: Message) -> Transfer | None:
    """Return the files through which KV is passed on, if the message ``start`` names any."""
    if "transfer" not in start:
        return None
    from octavo.offload.open_peers import TransferFiles

    return TransferFiles(start["transfer"]["own"], dict(start["transfer"]["peers"]))


def _load(
    args: dict[str, Any],
    record: InFlightRecord,
    meter: SwitchableMeter,
    transfer: Transfer | None,
) -> LoadedEngine:
    """Load the engine over an executor that is recorded, with its meter."""
    # The server has the queue with its limits, and refuses requests before they come here.
    unbounded = {"max_queued_requests": None, "max_queued_tokens": None}
    engine_args = EngineArgs(**(args | unbounded))

    def around(executor: Executor) -> Executor:
        return RecordedExecutor(_with_faults(executor), record)

    loaded = load_engine(
        engine_args,
        is_served=True,
        is_replica=True,
        around_executor=around,
        meter=meter,
        transfer=transfer,
    )
    _warm_up(loaded.text_engine)
    return loaded


def _with_faults(executor: Executor) -> Executor:
    """Return the executor, or one around it that misbehaves as a test asks for."""
    faults = os.environ.get(FAULTS_VARIABLE)
    if not faults:
        return executor
    from octavo.executor.faulty import FaultyExecutor

    _log.warning("faults are armed: %s", faults)
    return FaultyExecutor(executor, json.loads(faults))


def _warm_up(engine: TextEngine) -> None:
    """Answer a short prompt, so that the first client does not wait for pages of the model to be
    read."""
    token_id = next(iter(engine.eos_token_ids), 0)
    engine.add("warm-up", None, [token_id] * 2, SamplingParams(temperature=0.0, max_tokens=2))
    while engine.has_unfinished_requests:
        engine.step()
    engine.engine.scheduler.prefix_tokens_queried = 0  # not a client's


def _facts_of(loaded: LoadedEngine, activations: str) -> EngineFacts:
    """Return the facts about a loaded engine that the server needs."""
    config, info = loaded.config, loaded.info
    probe = loaded.text_engine.engine.executor.probe()
    spec = loaded.ranks.spec
    model = live_rank_model(
        loaded.model_config, probe.matrices(), probe.kv_bytes_per_token, spec.num_ranks
    )
    return EngineFacts(
        max_model_len=config.scheduler.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        vocab_size=loaded.text_engine.vocab_size,
        num_blocks=config.cache.num_blocks,
        block_size=config.cache.block_size,
        windows=tuple(config.cache.windows),
        sink_windows=config.scheduler.sink_windows,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        target_step_seconds=config.scheduler.target_step_seconds,
        eos_token_ids=loaded.text_engine.eos_token_ids,
        sampling_defaults=dict(loaded.model_config.sampling_defaults),
        info=info,
        choices=config.choices,
        rank_model=dataclasses.asdict(model),
        kv_bytes_per_token=probe.kv_bytes_per_token,
        runs_as={
            **{name: info[name] for name in ("device", "kernels", "isa", "dtype")},
            "kv_dtype": config.cache.dtype,
            "threads": probe.num_threads,
            "activations": activations,
        },
    )


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
