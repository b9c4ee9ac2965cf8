from __future__ import annotations

import pytest

from octavo.runtime.step_shapes import StepShape, decode_shapes, prompt_shapes


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (40, [1, 2, 4, 8, 16, 32, 40]),
    ],
)
def test_decodes(most, sizes):
    assert decode_shapes(most) == [StepShape.decode(size) for size in sizes]


def test_no_more_than_256_decodes():
    sizes = [shape.num_seqs for shape in decode_shapes(1000)]
    assert sizes[-2:] == [240, 256] and len(sizes) == 20


def test_prompts():
    shapes = [(s.num_tokens, s.num_seqs, s.max_query) for s in prompt_shapes(40, 100, 1.0)]
    assert shapes == [
        *[(16, 8, 16), (16, 16, 16), (32, 8, 32), (32, 32, 32)],
        *[(48, 8, 64), (48, 32, 64), (48, 40, 64), (64, 8, 64), (64, 32, 64), (64, 40, 64)],
        *[(96, 8, 128), (96, 32, 128), (96, 40, 128)],
        *[(100, 8, 128), (100, 32, 128), (100, 40, 128)],
    ]


def test_a_request_alone():
    assert prompt_shapes(1, 20, 1.0) == [StepShape(16, 1, 1, 16), StepShape(20, 1, 1, 32)]
    assert prompt_shapes(1, 15, 1.0) == []


@pytest.mark.parametrize(
    ("params", "most"), [(0.44e9, 2048), (2.3e9, 1024), (7e9, 256), (70e9, 32), (400e9, None)]
)
def test_steps_that_a_gpu_computes_for_longer_are_not_captured(params, most):
    shapes = prompt_shapes(256, 8192, 2 * params)
    assert (shapes[-1].num_tokens if shapes else None) == most
    assert len(shapes) <= 40


def test_padding_is_less_than_half():
    sizes = sorted({shape.num_tokens for shape in prompt_shapes(256, 2048, 1.0)})
    assert all(larger <= 1.5 * size for size, larger in zip(sizes[1:], sizes[2:], strict=False))
