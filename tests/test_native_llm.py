"""The native kernels under the public API: loading, unloading, forking, and saying why not."""

from __future__ import annotations

import gc
import logging
import os
import time
import warnings
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.base.errors import ConfigError
from octavo.kernels.cpu import library

needs_native = pytest.mark.skipif(not library.runnable(), reason="no native library was built")
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = "a prompt of some bytes"


def answer(llm: LLM) -> list[int]:
    return llm.generate([PROMPT], PARAMS, use_tqdm=False)[0].outputs[0].token_ids


def native_threads() -> int:
    names = [p.read_text() for p in Path("/proc/self/task").glob("*/comm")]
    return sum(name.startswith("octavo-") for name in names)


@needs_native
def test_an_unloaded_model_leaves_no_threads(tiny_model):
    gc.collect()  # engines of other tests
    before = native_threads()
    expected = None
    for _ in range(5):
        with LLM(str(tiny_model), threads=3) as llm:
            tokens = answer(llm)
            assert native_threads() == before + 2
        del llm
        gc.collect()
        assert native_threads() == before
        assert expected in (None, tokens)
        expected = tokens


@needs_native
def test_two_engines_in_one_process(tiny_model):
    with LLM(str(tiny_model)) as one, LLM(str(tiny_model), threads=1) as other:
        assert answer(one) == answer(other) == answer(one)


@needs_native
def test_an_idle_engine_takes_no_time(tiny_model):
    with LLM(str(tiny_model), threads=2) as llm:
        answer(llm)
        time.sleep(0.05)
        begin, used = time.perf_counter(), time.process_time()
        time.sleep(0.5)
        assert time.process_time() - used < 0.1 * (time.perf_counter() - begin)


@needs_native
def test_a_child_process_goes_on(tiny_model):
    with LLM(str(tiny_model), threads=2) as llm:
        expected = answer(llm)
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of forking with threads: that is what is tested
            child = os.fork()
        if child == 0:
            status = 1
            try:
                os.write(writer, repr(answer(llm)).encode())
                status = 0
            finally:
                os._exit(status)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            assert pipe.read() == repr(expected)
        assert os.waitpid(child, 0)[1] == 0
        assert answer(llm) == expected


@needs_native
def test_the_kernels_can_be_chosen(tiny_model, monkeypatch):
    with LLM(str(tiny_model), kernels="reference") as llm:
        info = llm.engine_info()
        assert (info["kernels"], info["isa"]) == ("reference", None)
    monkeypatch.setenv("OCTAVO_ISA", library.runnable()[-1])
    with LLM(str(tiny_model), kernels="native") as llm:
        info = llm.engine_info()
        assert (info["kernels"], info["isa"]) == ("native", library.runnable()[-1])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"block_size": 4}, "block_size 4 is not a multiple of 16"),
        ({"dtype": "bfloat16"}, "activations between native ops are float32"),
    ],
)
@needs_native
def test_what_is_not_native_is_said(tiny_model, caplog, settings, reason):
    with pytest.raises(ConfigError, match=reason):
        LLM(str(tiny_model), kernels="native", **settings)
    with caplog.at_level(logging.WARNING, "octavo"), LLM(str(tiny_model), **settings) as llm:
        assert llm.engine_info()["kernels"] == "reference"
        answer(llm)
    assert reason in caplog.text


def test_no_native_kernels_is_said_and_works(tiny_model, monkeypatch, caplog):
    monkeypatch.setenv("OCTAVO_ISA", "none")
    with caplog.at_level(logging.WARNING, "octavo"), LLM(str(tiny_model)) as llm:
        assert llm.engine_info()["kernels"] == "reference"
        answer(llm)
    assert caplog.text.count("asks for the reference kernels") == 1
