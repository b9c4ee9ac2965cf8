"""Weights on their way to a device, of which a double does nothing before it is waited for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.quantization.upload import ChunkedUpload, CudaQueue, upload_at_once

CHUNK = 32


class LateQueue:
    """A device that copies as late as it may: a buffer that is filled again too early, or a tensor
    that is read too early, is wrong. It counts the bytes that leave the host."""

    def __init__(self):
        self.uploaded = 0
        self._waiting = []
        self._pinned = []

    def pinned(self, num_bytes):
        self._pinned.append(torch.full((num_bytes,), 0xEE, dtype=torch.uint8))
        return self._pinned[-1]

    def empty(self, num_values, dtype):
        return torch.full((num_values,), 0xEE, dtype=torch.uint8).to(dtype)

    def copy(self, source, target):
        if any(source.data_ptr() == buffer.data_ptr() for buffer in self._pinned):
            self.uploaded += source.nbytes
        self._waiting.append((source, target))

    def mark(self):
        return _Mark(self, len(self._waiting))

    def finish(self, count=None):
        for source, target in self._waiting[:count]:
            target.copy_(source)
        self._waiting[:count] = [(target, target) for _, target in self._waiting[:count]]


class _Mark:
    def __init__(self, queue, count):
        self._queue, self._count = queue, count

    def wait(self):
        self._queue.finish(self._count)


@given(
    st.lists(st.integers(1, 5 * CHUNK), min_size=1, max_size=5),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_chunks_make_what_one_copy_does(sizes, of, to):
    queue = LateQueue()
    upload = ChunkedUpload(queue, CHUNK)
    values = [torch.randn(size).to(of) for size in sizes]
    data = [each.view(torch.uint8).numpy() for each in values]
    made = [upload(each, of, to) for each in data]
    queue.finish()
    plain = upload_at_once(torch.device("cpu"))
    for got, each in zip(made, data, strict=True):
        assert torch.equal(got, plain(each, of, to))
    assert queue.uploaded == sum(each.nbytes for each in data)  # each byte once


def test_bytes_keep_their_shape():
    queue = LateQueue()
    blocks = np.arange(18 * 7, dtype=np.uint8).reshape(7, 18)
    made = ChunkedUpload(queue, CHUNK)(blocks, torch.uint8, torch.uint8)
    queue.finish()
    assert np.array_equal(made.numpy(), blocks)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gets_the_same():
    device = torch.device("cuda")
    data = torch.randn(10_007).view(torch.uint8).numpy()
    made = ChunkedUpload(CudaQueue(device), 4096)(data, torch.float32, torch.bfloat16)
    plain = upload_at_once(device)(data, torch.float32, torch.bfloat16)
    assert torch.equal(made, plain)


def test_tensors_that_lie_in_another_order_become_contiguous():
    queue = LateQueue()
    values = torch.arange(12.0).view(3, 4).t()
    made = ChunkedUpload(queue, CHUNK).tensor(values)
    queue.finish()
    assert torch.equal(made, values) and made.is_contiguous()
