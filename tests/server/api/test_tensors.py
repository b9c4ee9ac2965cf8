"""``GET /octavo/tensors``: what a process of its own reads of the model's files."""

from __future__ import annotations

from base64 import b64decode
from dataclasses import replace

import numpy as np
import pytest
from safetensors.torch import load_file

from octavo.server.api.octavo import tensors

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def get(fake_engine, create_service, send, tiny_model):
    def get(path="", model=tiny_model):
        service = replace(create_service(fake_engine), model_path=model)
        return send(tensors.create_router(service), "GET", f"/octavo/tensors{path}")

    return get


def test_weights_are_listed_and_read(get, tiny_model):
    stored = load_file(tiny_model / "model.safetensors")
    listed = get().json()
    assert {entry["name"] for entry in listed["tensors"]} == set(stored)
    found = get(f"/{NAME}?down=1").json()
    values = np.frombuffer(b64decode(found["float32"]), "<f4")
    np.testing.assert_array_equal(values, stored[NAME][-8:].float().ravel())


@pytest.mark.parametrize(
    "path, status, part",
    [
        ("/model.layers.9.weight", 404, "no tensor 'model.layers.9.weight'"),
        ("/../../etc/passwd", 404, ""),
        (f"/{NAME}?down=2", 400, "down: must be a number from 0 to 1"),
        (f"/{NAME}?across=left", 400, "across"),
        (f"/{NAME}?down=nan", 400, "down"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(get, path, status, part):
    answer = get(path)
    assert answer.status_code == status
    assert part in answer.text


def test_files_that_cannot_be_read_are_said_without_their_place(get, tmp_path):
    (tmp_path / "secret").mkdir()
    answer = get(model=tmp_path / "secret" / "model.gguf")
    assert answer.status_code == 400
    assert str(tmp_path) not in answer.text
    assert get(model=None).status_code == 404
