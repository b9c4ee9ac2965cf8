"""The interface of executors, which run batches; implemented in :mod:`octavo.executor`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from octavo.base.errors import EngineError
from octavo.core.batch import Batch, StepOutput
from octavo.core.request import Request


class StepHandle(Protocol):
    """A submitted step. ``ready_at`` is its end in simulated time, None in real time."""

    @property
    def ready_at(self) -> float | None: ...

    def result(self) -> StepOutput:
        """Wait for the step and return its output. Called once, in order of submission."""
        ...


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """The handle of a step that was over when ``submit`` returned."""

    output: StepOutput
    ready_at: float | None = None

    def result(self) -> StepOutput:
        return self.output


@dataclass(frozen=True, slots=True)
class FailedStep:
    """The handle of a step that raised while it was submitted."""

    error: Exception
    ready_at: float | None = None

    def result(self) -> StepOutput:
        raise self.error


class Executor(Protocol):
    """Runs batches in the order of their submission.

    A step that raises may be run again, in parts and without its block copies: everything that it
    had written until then is overwritten.

    ``submit`` reads all it needs from the batch (block tables too) before it returns, because the
    scheduler may change them afterwards.

    An executor that keeps sampled tokens (``feeds_tokens``) is given steps that go on from a token
    which the step before has yet to sample, for those requests that it ``feeds``, so that other
    requests can wait for their tokens without slowing these: then ``request.token_ids`` ends one
    token short of ``item.end``, and the executor takes the one it sampled. The position of the
    token that it samples next is ``item.end``, whatever the request knows by then, and penalties
    have to count the awaited token too. If a step raises, later ones that would go on from it are
    given up: their results for these requests do not matter, and they may raise as well.
    """

    @property
    def depth(self) -> int:
        """Number of batches that may be in flight, the one being run included."""
        ...

    @property
    def feeds_tokens(self) -> bool:
        """True if a request may be in several of them. Of no use to a pipeline of ranks, whose
        first stage would stand still until the last one has sampled."""
        ...

    def feeds(self, request: Request) -> bool:
        """Return whether this request may: whether its tokens are chosen without the host. Asked
        once, when it is added, where ``feeds_tokens``."""
        ...

    def kv_capacity(self) -> int:
        """Return the number of blocks that fit into the memory set aside for KV."""
        ...

    def submit(self, batch: Batch) -> StepHandle: ...

    def probe(self) -> Probe:
        """Return a view of the executor for code that measures or inspects it: benchmarks,
        quality."""
        ...

    def close(self) -> None: ...


class ExecutorAround:
    """Another executor. Subclasses do something before or after its steps."""

    def __init__(self, executor: Executor):
        self._executor = executor

    @property
    def depth(self) -> int:
        return self._executor.depth

    @property
    def feeds_tokens(self) -> bool:
        return self._executor.feeds_tokens

    def feeds(self, request: Request) -> bool:
        return self._executor.feeds(request)

    def kv_capacity(self) -> int:
        return self._executor.kv_capacity()

    def submit(self, batch: Batch) -> StepHandle:
        return self._executor.submit(batch)

    def probe(self) -> Probe:
        return self._executor.probe()

    def close(self) -> None:
        self._executor.close()


class LogitsObserver(Protocol):
    """Receives whole rows of logits at positions of prompts."""

    def wants(self, request: Request) -> range:
        """Return the positions still to be shown; asked for each request of a step.

        A preempted request computes its positions again: those that it does not name again are
        shown once.
        """
        ...

    def observe(self, request: Request, first: int, logits: Any) -> None:
        """Take logits [R, V] of R positions from ``first`` on; row p scores the token at p + 1.

        They are a float32 array of numpy, which the core does not know; not to be changed, nor kept
        after the call.
        """
        ...


class WeightMatrix(Protocol):
    """A weight that a step reads whole, as it lies in memory.

    ``is_head``: it makes logits, and is read only where something is sampled. ``arithmetic``: the
    type of its products, by a name that :meth:`Probe.products` knows. ``share``: for an expert's
    matrix, (experts that a token uses, experts); it is read if any token uses it.
    """

    @property
    def is_head(self) -> bool: ...
    @property
    def num_params(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def arithmetic(self) -> str: ...
    @property
    def share(self) -> tuple[int, int] | None: ...


class Probe(Protocol):
    """A view of an executor's facts and figures. It stays valid as long as the executor, and its
    figures move on with it."""

    @property
    def isa(self) -> str | None:
        """Instruction set of the native CPU kernels, None without them."""
        ...

    @property
    def num_threads(self) -> int: ...

    @property
    def kernel_seconds(self) -> float:
        """Time spent in the model so far: the rest of a step's time is the engine's."""
        ...

    @property
    def kv_bytes_per_token(self) -> float:
        """KV bytes of one token, in all layers."""
        ...

    @property
    def attention_arithmetic(self) -> str: ...

    def matrices(self) -> Sequence[WeightMatrix]:
        """Return the weights that a step reads. An embedding is none: a step takes rows of it."""
        ...

    def products(self, arithmetic: str) -> Callable[[int], float]:
        """Return a probe of the device: called with a number of repetitions, it multiplies as
        the model's kernels do, and returns the number of operations."""
        ...

    def reads(self) -> Callable[[], float]:
        """Return a probe of the device: called, it reads more memory than any cache holds, and
        returns the bytes."""
        ...

    def expert_figures(self) -> Mapping[str, Any]:
        """Return the fields of `octavo.core.stats.StepStats` about experts; none without experts,
        or without counting."""
        ...

    def expert_loads(self) -> Sequence[Sequence[int]]:
        """Return the tokens that each expert got so far, for each layer that has experts; ()
        likewise. They move on with the executor."""
        ...

    def observe_logits(self, observer: LogitsObserver | None) -> None:
        """Show the logits of prompts to ``observer``, from the next step on; None ends it."""
        ...


class NoModel:
    """The probe of an executor in which no model runs."""

    isa: str | None = None
    num_threads = 0
    kernel_seconds = 0.0
    kv_bytes_per_token = 0.0
    attention_arithmetic = ""

    def matrices(self) -> Sequence[WeightMatrix]:
        return ()

    def expert_figures(self) -> Mapping[str, Any]:
        return {}

    def expert_loads(self) -> Sequence[Sequence[int]]:
        return ()

    def products(self, arithmetic: str) -> Callable[[int], float]:
        raise self._nothing("products")

    def reads(self) -> Callable[[], float]:
        raise self._nothing("reads")

    def observe_logits(self, observer: LogitsObserver | None) -> None:
        if observer is not None:
            raise self._nothing("logits")

    def _nothing(self, wanted: str) -> EngineError:
        return EngineError(f"there are no {wanted} to see: no model runs in this executor")
