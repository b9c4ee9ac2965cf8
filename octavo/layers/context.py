"""What a forward pass needs besides the tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

    from octavo.kernels.dispatch import Ops
    from octavo.kernels.op_arguments import Rotation, RowNorm


class Activations(Protocol):
    """What ops take and give, T tokens first: tensors, or what stands for them in a recording."""

    def view(self, tokens: int, /, *shape: int) -> Any: ...


class StepAttention(Protocol):
    """The attention of one step: it knows where the keys and values of its tokens are kept, and
    those of all that its sequences had before."""

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
    ) -> Any:
        """Keep k and v [T, Hk, D], and attend q [T, H, D] to what a layer has kept: [T, H, D].

        A query sees its own position and those before it: all, or ``window`` of them in all. Or
        what its request asks for: then ``rotated`` gives q as it is at other positions.
        ``sinks`` [H] are logits in the softmax of each head that no value belongs to.
        """
        ...

    def attend_latents(
        self,
        layer: int,
        q: Any,
        ckv: Any,
        norm: RowNorm,
        rotation: Rotation,
        kv_b: Any,
        *,
        scale: float,
    ) -> Any:
        """Keep what the ops ``store_latents`` and ``latent_attention`` say of ckv
        [T, rank + rope], and attend q [T, H, nope + rope]: [T, H, values of a head]."""
        ...


class ForwardContext(Protocol):
    """One step of T tokens, handed down as an argument from the model to every layer.

    Running a model keeps the KV of the step's tokens, writes the states of its sequences, and
    changes nothing else.
    """

    @property
    def positions(self) -> Any:
        """int64 [T], the place of each token in its own sequence."""
        ...

    @property
    def attention(self) -> StepAttention: ...
    @property
    def ops(self) -> Ops: ...

    def states(self, layer: int) -> Any:
        """What ops of recurrent layers take as the states of one, counting those layers alone."""
        ...

    def rope_table(self, table: Callable[[int], np.ndarray], rotary_dim: int) -> Any:
        """Cosines and sines for all positions of the step, of ``table(num_positions)``."""
        ...
