"""The forward pass of a follower in a pipeline: some of the layers, and what crosses their ends.

The home rank has the last stage and samples (``pipelined_forward.py``). Every other rank obeys its
messages: it takes the hidden states of a step from the stage before, computes its layers, and hands
on what they make. A step that fails is handed on as failed, so that all stages drop it.
"""

from __future__ import annotations

from typing import Any

from octavo.base.errors import PeerEndedError
from octavo.kernels.cpu.program import Program
from octavo.kernels.stages import StageOps
from octavo.runtime.following_forward import FollowingForward
from octavo.runtime.stage_links import PipelinePlace, StageFailedError
from octavo.runtime.step_words import BadMessage, StepHeader


class StageEnds:
    """Both ends of a stage: memory where values of a step come in, and where they go out."""

    def __init__(self, place: PipelinePlace, own: StageOps, program: Program):
        self._incoming, self._outgoing = place.incoming, place.outgoing
        self._group = program.group
        self._is_last = place.stage.is_last
        self._inputs = [program.buffer(value) for value in own.inputs]
        self._outputs = [program.buffer(value) for value in own.outputs]
        for link, values in ((self._incoming, own.inputs), (self._outgoing, own.outputs)):
            if link is not None:
                widths = [value.width for value in values]
                link.open(widths, program.max_tokens, place.stage.count)

    def take(self, number: int, num_tokens: int) -> None:
        """Wait for the values of a step, and put them where the program reads them.

        Raises:
            StageFailedError: there are none, as an earlier stage has failed.
        """
        if self._incoming is not None:
            self._incoming.receive(number, [value[:num_tokens] for value in self._inputs])

    def give(self, number: int, num_tokens: int) -> None:
        """Hand on the values of a step that all ranks of the stage have computed."""
        if self._is_last:
            return
        if self._outgoing is not None:
            self._outgoing.send(number, [value[:num_tokens] for value in self._outputs])
        if self._group is not None:
            self._group.meet()  # before it is sent, no rank overwrites what the ranks share

    def fail(self, number: int, reason: str) -> None:
        """Hand on that a step has failed."""
        if self._outgoing is not None:
            self._outgoing.fail(number, reason)


class StageForward(FollowingForward):
    """The steps of one stage, from messages."""

    def __init__(self, place: PipelinePlace, own: StageOps, *arguments: Any):
        super().__init__(*arguments)
        self._stage = place.stage
        self._ends = StageEnds(place, own, self.program)

    def exit_after(self, num_layers: int) -> FollowingForward:
        raise BadMessage(f"an exit after layer {num_layers} of a pipeline")

    def _compute(self, header: StepHeader) -> None:
        if self._stage.is_last:
            if header.head_only:
                return super()._compute(header)
        elif header.head_only:
            return None
        else:
            self._arguments.num_out = 0
        number, num_tokens = header.number, header.num_tokens
        try:
            self._ends.take(number, num_tokens)
            super()._compute(header)
        except PeerEndedError:
            raise
        except StageFailedError as error:
            self._ends.fail(number, str(error))
        except Exception as error:  # what becomes of its requests is up to the home rank
            where = f"stage {self._stage.index} of {self._stage.count}"
            self._ends.fail(number, f"{where}: {type(error).__name__}: {error}")
        else:
            self._ends.give(number, num_tokens)
        return None
