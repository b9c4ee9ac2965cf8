"""A small driver for models: no scheduler, every sequence in its own blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from loading import load_model

from octavo.core.state_types import NO_STATE
from octavo.kernels.cpu import abi, library
from octavo.kernels.dispatch import create_ops
from octavo.kernels.kv_stores import FloatCodec, KVStore
from octavo.kernels.recurrence import LayerStates, SequenceStates
from octavo.layers.tensors import with_tensors
from octavo.runtime.backends import NativeBackend, pack_model
from octavo.runtime.capacity import RankLimits, RankSpec
from octavo.runtime.eager_attention import GroupInputs, PagedAttention
from octavo.runtime.eager_forward import EagerContext

BLOCK_SIZE = 16


class _Caches:
    def __init__(self, config, num_blocks, dtype, device):
        kept = config.kv_layers[0]
        shape = (config.num_layers, num_blocks, BLOCK_SIZE, kept.num_kv_heads)
        self._memory = [
            torch.zeros(*shape, width, dtype=dtype, device=device)
            for width in (kept.key_dim, kept.value_dim)
        ]
        self._codec = FloatCodec(dtype)

    def layer(self, index):
        keys, values = (KVStore(self._codec, [memory[index]]) for memory in self._memory)
        return keys, values


class Driver:
    """A loaded model, and what it answers to lists of token ids."""

    def __init__(self, path, dtype=torch.float32, device="cpu", **kwargs):
        model, self.config = load_model(path, **kwargs)
        self.model = with_tensors(model, device, dtype)
        self.ops = create_ops(str(dtype).removeprefix("torch."))
        self._dtype, self._device = dtype, torch.device(device)

    def logits(self, prompts: list[list[int]], last: int | None = None) -> list[torch.Tensor]:
        """Logits of prompts, all in one ragged step: float32 [positions, vocab_size] for each.

        ``last`` is how many positions from the end, None all of them.
        """
        caches, tables = self._caches(prompts, 0)
        with torch.inference_mode():
            hidden, ctx = self._forward(prompts, [0] * len(prompts), caches, tables)
            rows = hidden.split([len(prompt) for prompt in prompts])
            return [self.model.compute_logits(r[-last if last else 0 :], ctx).cpu() for r in rows]

    def greedy(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """The next ``num_tokens`` of each prompt."""
        caches, tables = self._caches(prompts, num_tokens)
        new, starts = prompts, [0] * len(prompts)
        outputs: list[list[int]] = [[] for _ in prompts]
        with torch.inference_mode():
            for _ in range(num_tokens):
                hidden, ctx = self._forward(new, starts, caches, tables)
                last = torch.tensor([len(tokens) for tokens in new]).cumsum(0) - 1
                best = self.model.compute_logits(hidden[last], ctx).argmax(dim=-1).tolist()
                for output, token in zip(outputs, best, strict=True):
                    output.append(token)
                starts = [start + len(tokens) for start, tokens in zip(starts, new, strict=True)]
                new = [[token] for token in best]
        return outputs

    def _caches(self, prompts, num_more):
        longest = max(map(len, prompts)) + num_more
        blocks_each = -(-longest // BLOCK_SIZE)
        num_blocks = blocks_each * len(prompts)
        caches = _Caches(self.config, num_blocks, self._dtype, self._device)
        return caches, torch.arange(num_blocks, dtype=torch.int32).view(len(prompts), blocks_each)

    def _forward(self, new, starts, caches, tables):
        lengths = [len(tokens) for tokens in new]
        positions = torch.cat(
            [torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]
        )
        first_slot = torch.arange(len(new)) * tables.shape[1] * BLOCK_SIZE
        slots = positions + first_slot.repeat_interleave(torch.tensor(lengths))
        seq_lens = [start + n for start, n in zip(starts, lengths, strict=True)]
        plan = self.ops.plan_attention(
            tables.to(self._device),
            torch.tensor([0, *lengths]).cumsum(0).int().to(self._device),
            torch.tensor(seq_lens, dtype=torch.int32, device=self._device),
            max(lengths),
            max(seq_lens),
            BLOCK_SIZE,
        )
        group = GroupInputs(slots.to(self._device), plan)
        attention = PagedAttention(self.ops, caches, [group], [0] * self.config.num_layers)
        states = self._states(lengths, starts)
        ctx = EagerContext(positions.to(self._device), attention, self.ops, layer_states=states)
        token_ids = torch.tensor([token for tokens in new for token in tokens])
        return self.model(token_ids.to(self._device), ctx), ctx

    def _states(self, lengths, starts):
        """Of recurrent layers: a sequence has one slot, in which it goes on."""
        if starts[0] == 0:
            self._memories = [
                [torch.zeros(len(lengths), *shape, device=self._device) for shape in spec.shapes]
                for spec in self.config.state_layers
            ]
        ends = torch.tensor(lengths).cumsum(0).tolist()
        sequences = [
            SequenceStates(end - length, end, slot if start else None, slot)
            for slot, (end, length, start) in enumerate(zip(ends, lengths, starts, strict=True))
        ]
        return [LayerStates(memories, sequences) for memories in self._memories]


class NativeDriver:
    """The same on the native kernels, by the step program alone. float32 KV, so that little is
    rounded; weights as the model has them."""

    def __init__(self, path, kv="f32", threads=1, activations="auto"):
        self.model, self.config = load_model(path)
        spec = RankSpec(Path(path), kv_cache_dtype=kv, threads=threads, activations=activations)
        backend = NativeBackend(spec, self.config, pack_model(spec, self.model))
        self._make_forward = backend.create_forward

    def logits(self, prompts: list[list[int]], last: int | None = None) -> list[torch.Tensor]:
        """As ``Driver.logits``."""
        lengths = [len(prompt) for prompt in prompts]
        blocks_each = -(-max(lengths) // BLOCK_SIZE)
        limits = RankLimits(
            num_blocks=blocks_each * len(prompts),
            max_num_seqs=len(prompts),
            max_model_len=max(lengths),
            max_num_batched_tokens=sum(lengths),
            num_state_slots=len(prompts),
        )
        forward = self._make_forward(limits)
        ends = np.cumsum(lengths)
        rows = np.concatenate(
            [np.arange(end - (last or n), end) for end, n in zip(ends, lengths, strict=True)]
        ).astype(np.int32)
        logits = torch.empty(len(rows), self.config.vocab_size)
        arrays = {
            "q_start": np.array([0, *ends], dtype=np.int32),
            "kv_len": np.array(lengths, dtype=np.int32),
            "block_table": np.arange(limits.num_blocks, dtype=np.int32),
            "token_ids": np.array([t for prompt in prompts for t in prompt], dtype=np.int32),
            "out_rows": rows,
            "logits": np.array([row.data_ptr() for row in logits], dtype=np.uintp),
            "tokens": np.zeros(len(rows), dtype=np.int32),
            "status": np.zeros(len(rows), dtype=np.int32),
            "row_finite": np.zeros(sum(lengths), dtype=np.uint8),
            "state_source": np.full(len(prompts), NO_STATE, dtype=np.int32),
            "state_target": np.arange(len(prompts), dtype=np.int32),
        }
        of_sequences = ("q_start", "kv_len", "block_table", "state_source", "state_target")
        at = {name: array.ctypes.data for name, array in arrays.items()}
        batch = abi.Batch(
            seqs=abi.Sequences(
                num_seqs=len(prompts),
                num_tokens=sum(lengths),
                table_stride=blocks_each,
                block_size=BLOCK_SIZE,
                **{name: at.pop(name) for name in of_sequences},
            ),
            num_multi_steps=1,
            num_out=len(rows),
            samples=(abi.Sample * len(rows))(),
            **at,
        )
        forward.program.step(batch, max(lengths))
        assert arrays["row_finite"].all() and not arrays["status"].any()
        assert (arrays["tokens"] == logits.argmax(dim=-1).numpy()).all()
        return list(logits.split([last or n for n in lengths]))


@pytest.fixture
def native_driver():
    if not library.runnable():
        pytest.skip("no native library was built")
    return NativeDriver


@pytest.fixture
def driver():
    """The class Driver; a fixture because test modules cannot import each other."""
    return Driver
