from __future__ import annotations

import pytest

import octavo
from octavo.base import errors


def test_public_names_are_listed_sorted_and_there():
    assert octavo.__all__ == ["__version__", *sorted(octavo.__all__[1:])]
    for name in octavo.__all__:
        assert getattr(octavo, name) is not None
    assert {"LLM", "AsyncLLM", "AsyncEngineArgs", "AsyncLLMEngine", "SamplingParams"} <= set(
        octavo.__all__
    )


def test_the_ecosystems_names_mean_the_same():
    assert octavo.AsyncLLMEngine is octavo.AsyncLLM
    assert octavo.AsyncEngineArgs(model="m", disable_log_stats=True) == octavo.EngineArgs("m")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        octavo.nonsense  # noqa: B018


def test_every_error_is_an_octavo_error_and_drawn_in_the_tree():
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, errors.OctavoError)
            assert name in errors.__doc__


def test_model_file_errors_say_where():
    error = errors.ModelFileError("/m.gguf", "too short", field="tensor_count", offset=8)
    assert str(error) == "/m.gguf at byte 8 (tensor_count): too short"
    assert (error.field, error.offset, error.reason) == ("tensor_count", 8, "too short")


def test_quantization_exports_what_its_document_says():
    from octavo import quantization, quantize

    named = {"quantize_to_nearest", "quantize_gptq", "input_statistics", "quantize_model"}
    named |= {"calibration_windows", "RotatedCheckpoint"}
    assert named <= set(quantize.__all__) and "quantize_to_blocks" in quantization.__all__
