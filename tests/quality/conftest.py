from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.quality.perplexity import engine_args
from octavo.quality.scoring import ScoredRow, log_sum_of
from octavo.serving.load import load_engine
from octavo.serving.text_engine import TextEngine

TEXT = "".join(f"{i * i % 97} bottles of beer on wall {i}, and one falls.\n" for i in range(40))


@pytest.fixture
def text() -> str:
    """About 1,600 characters, of as many tokens to the tiny model."""
    return TEXT


@pytest.fixture
def load(tiny_model: Path) -> Iterator[Callable[..., TextEngine]]:
    """Makes engines of a model, the tiny one if none is named, with a thread each; closed at the
    end."""
    with ExitStack() as stack:

        def load_model(ctx: int, model: Path = tiny_model, **settings: Any) -> TextEngine:
            settings = {"kernels": "reference", "threads": 1, **settings}
            text_engine = load_engine(engine_args(str(model), ctx, **settings)).text_engine
            stack.callback(text_engine.engine.close)
            return text_engine

        yield load_model


@pytest.fixture(scope="session")
def bos_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with a tokenizer that puts BOS, token 257, before a text."""
    folder = shutil.copytree(tiny_model, tmp_path_factory.mktemp("bos") / "model")
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<bos>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [257], "tokens": ["<bos>"]}},
    }
    path.write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture
def to_row() -> Callable[..., ScoredRow]:
    """What a row of logits is to a sink."""

    def create(number: int, logits: np.ndarray, target: int) -> ScoredRow:
        logits = np.asarray(logits, dtype=np.float32)
        distances = logits.max() - logits
        log_sum = log_sum_of(distances)
        nll = log_sum + float(distances[target])
        return ScoredRow(number, nll, int(logits.argmax()), distances, log_sum)

    return create
