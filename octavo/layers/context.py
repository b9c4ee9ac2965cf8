"""Interfaces between layers and a forward pass: activations, a step's attention, and its
context."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

    from octavo.kernels.dispatch import Ops
    from octavo.kernels.op_arguments import RopeArguments, RowNorm


class Activations(Protocol):
    """Inputs and results of ops, T tokens first: tensors, or their stand-ins in a recording."""

    def view(self, tokens: int, /, *shape: int) -> Any: ...


class StepAttention(Protocol):
    """The attention of one step.

    It knows the cache slots of the step's tokens, and those of all earlier tokens of their
    sequences.
    """

    def attend(
        self,
        layer: int,
        q: Any,
        k: Any,
        v: Any,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Any = None,
        rotated: Callable[[Any], Any] | None = None,
        bidirectional: bool = False,
    ) -> Any:
        """Store k and v [T, Hk, D] in the KV cache of a layer, and return the attention of q
        [T, H, D] over what the cache has: [T, H, D].

        A query sees its own position and those before it, ``window`` of them if that is given;
        ``bidirectional``, it sees those after it in the same way, all of which are in the step. A
        request with a sink window sees what that says; then ``rotated`` returns q rotated to other
        positions. ``sinks`` [H] are logits in the softmax of each head that belong to no value.
        """
        ...

    def attend_latents(
        self,
        layer: int,
        q: Any,
        ckv: Any,
        norm: RowNorm,
        rotation: RopeArguments,
        kv_b: Any,
        *,
        scale: float,
    ) -> Any:
        """Store the latent vectors of ckv [T, rank + rope] as the op ``store_latents`` does, and
        return the attention of q [T, H, nope + rope] over them as ``latent_attention`` does:
        [T, H, value_dim]."""
        ...


class ForwardContext(Protocol):
    """One step of T tokens, passed as an argument from the model to every layer.

    A forward pass stores the KV of the step's tokens and writes the states of its sequences, and
    changes nothing else.
    """

    @property
    def positions(self) -> Any:
        """Position of each token in its own sequence, int64 [T]."""
        ...

    @property
    def token_types(self) -> Any:
        """Type of each token, int64 [T]: which of two texts it is of; 0 where there is one."""
        ...

    @property
    def attention(self) -> StepAttention: ...
    @property
    def ops(self) -> Ops: ...

    def states(self, layer: int) -> Any:
        """States that the ops of a recurrent layer read and write; ``layer`` counts recurrent
        layers alone."""
        ...

    def rope_table(self, table: Callable[[int], np.ndarray], rotary_dim: int) -> Any:
        """Cosines and sines of all positions of the step, from ``table(num_positions)``."""
        ...
