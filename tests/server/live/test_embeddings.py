"""A server of a model that pools, as clients meet it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from tiny_encoders import make_encoder

from octavo import LLM

pytestmark = pytest.mark.xdist_group("live-embeddings")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("live")
    make_encoder("modernbert", folder)
    return folder


@pytest.fixture(scope="module")
def client(live_server, encoder):
    with live_server(encoder) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def embed(client, texts, **more):
    answer = client.post("/v1/embeddings", json={"input": texts, **more})
    return answer.status_code, answer.json()


def test_vectors_are_those_of_the_library_in_any_company(client, encoder):
    texts = [f"text number {number} " + "x" * (number % 50) for number in range(60)]
    with LLM(str(encoder)) as llm:
        expected = [output.outputs.embedding for output in llm.embed(texts)]
    assert embed(client, texts)[1]["data"][7]["embedding"] == expected[7]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda text: embed(client, text)[1], texts))
    assert [answer["data"][0]["embedding"] for answer in answers] == expected


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/completion", {"prompt": "a"}),
        ("/generate", {"prompt": "a"}),
    ],
)
def test_it_generates_nothing(client, path, body):
    answer = client.post(path, json=body)
    assert answer.status_code == 400
    assert "generates none" in json.dumps(answer.json())


def test_a_wrong_request_fails_alone(client):
    status, answer = embed(client, ["a", "b" * 300])
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    assert embed(client, ["a", "b" * 300], truncate_prompt_tokens=-1)[0] == 200
    assert client.get("/health").status_code == 200
    assert "octavo:" in client.get("/metrics").text
