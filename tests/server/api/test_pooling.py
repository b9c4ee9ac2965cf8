"""Routes whose answers are vectors and scores: their requests to the engine, and their answers."""

from __future__ import annotations

import base64
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from octavo.base.errors import QueueFullError
from octavo.models.pooling import Pooling
from octavo.server.api.pooling import others, reranking, routes
from octavo.server.engine.generation import Generation
from octavo.serving.outputs import Delta
from octavo.serving.pooling_facts import pooling_facts

SIZE = 4
EMBEDS = Pooling(prompts={"query": "Q: ", "none": ""}, methods=("mean",))
SCORES = Pooling(labels=("relevant",), normalize=False, activation="sigmoid")
LABELS = Pooling(labels=("bad", "good"), normalize=False, activation="softmax")


def vector_of(request):
    """What the engine answers: the number of tokens, and the first three."""
    ids = request.prompt_token_ids
    return np.array([len(ids), *ids[:3], 0, 0, 0][:SIZE], dtype=np.float32)


@pytest.fixture
def engine(fake_engine_type, byte_tokenizer):
    class PoolingEngine(fake_engine_type):
        result = staticmethod(vector_of)
        failure = None

        def submit(self, request):
            if self.submit_error is not None and len(self.requests) >= self.error_after:
                raise self.submit_error
            self.requests.append(request)
            generation = Generation(request, lambda one: None)
            end = [Delta(0, finish_reason="stop", pooled=self.result(request))]
            if self.failure is not None:
                end = [Delta(0, finish_reason="error", error=self.failure)]
            generation.push(end)
            self.generations.append(generation)
            return generation

    return PoolingEngine(byte_tokenizer)


@pytest.fixture
def ask(engine, create_service, send):
    """``ask(path, pooling=…, status=…, **body)``: the answer as JSON, or its error."""

    def ask(path, status=200, pooling=EMBEDS, size=SIZE, **body):
        info = {} if pooling is None else {"pooling": pooling_facts(pooling, size, 2)}
        engine.facts = replace(engine.facts, info=info)
        service = create_service(engine)
        makers = (
            routes.create_router,
            reranking.create_router,
            others.create_router,
            others.create_ollama_router,
        )
        for make in makers:
            router = make(service)
            if any(route.path == path for route in router.routes):
                response = send(router, "POST", path, json=body)
                break
        assert response.status_code == status, response.text
        return response.json() if status == 200 else response.json()["error"]

    return ask


def texts_of(engine):
    return [engine.tokenizer.decode(request.prompt_token_ids) for request in engine.requests]


# -- OpenAI ----------------------------------------------------------------------------------------


def test_an_embedding_has_the_form_of_openai(ask, engine):
    answer = ask("/v1/embeddings", input="abcde", model="tiny")
    assert answer["object"] == "list" and answer["model"] == "tiny"
    assert answer["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    (entry,) = answer["data"]
    assert entry["object"] == "embedding" and entry["index"] == 0
    assert entry["embedding"] == vector_of(engine.requests[0]).tolist()
    assert engine.requests[0].pooling.params.task == "embed"


@pytest.mark.parametrize(
    ("given", "lengths"),
    [("abc", [3]), (["ab", "c"], [2, 1]), ([7, 8, 9], [3]), ([[7], [8, 9]], [1, 2])],
)
def test_input_is_a_text_or_ids_or_several(ask, engine, given, lengths):
    answer = ask("/v1/embeddings", input=given)
    assert [entry["index"] for entry in answer["data"]] == list(range(len(lengths)))
    assert [len(request.prompt_token_ids) for request in engine.requests] == lengths
    assert answer["usage"]["total_tokens"] == sum(lengths)


def test_base64_is_of_float32(ask, engine):
    (entry,) = ask("/v1/embeddings", input="abc", encoding_format="base64")["data"]
    read = np.frombuffer(base64.b64decode(entry["embedding"]), dtype="<f4")
    assert read.tolist() == vector_of(engine.requests[0]).tolist()


def test_dimensions_and_scaling_are_passed_on(ask, engine):
    ask("/v1/embeddings", input="abc", dimensions=2, use_activation=False)
    ask("/v1/embeddings", input="abc", normalize=True)
    first, second = (request.pooling.params for request in engine.requests)
    assert (first.dimensions, first.use_activation) == (2, False)
    assert (second.dimensions, second.use_activation) == (None, True)


def test_a_prompt_of_the_model_goes_before_a_text(ask, engine):
    ask("/v1/embeddings", input="cat", prompt_name="query")
    assert texts_of(engine) == ["Q: cat"]
    error = ask("/v1/embeddings", 400, input="cat", prompt_name="other")
    assert error["param"] == "prompt_name" and "'query'" in error["message"]


def test_a_text_that_is_too_long_can_be_truncated(ask, engine):
    ask("/v1/embeddings", input="x" * 300, truncate_prompt_tokens=-1)
    ask("/v1/embeddings", input=[[5] * 300], truncate_prompt_tokens=7)
    assert [len(each.prompt_token_ids) for each in engine.requests] == [256, 7]
    error = ask("/v1/embeddings", 400, input="x", truncate_prompt_tokens=257)
    assert error["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", 5]}, "input.1"),
        ({"input": [5, "a"]}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": [[]]}, "input.0"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": SIZE + 1}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
        ({"input": "a", "messages": [{}]}, "messages"),
        ({"input": [999]}, "input"),
    ],
)
def test_a_wrong_field_is_named(ask, engine, body, param):
    assert ask("/v1/embeddings", 400, **body)["param"] == param
    assert not engine.requests


def test_a_model_that_generates_embeds_nothing(ask):
    assert "--runner pooling" in ask("/v1/embeddings", 400, pooling=None, input="a")["message"]
    error = ask("/v1/embeddings", 400, pooling=SCORES, size=1, input="a")
    assert "scores labels" in error["message"]


def test_many_texts_come_to_the_engine_in_parts(ask, engine):
    engine.limits = replace(engine.limits, max_requests=256)
    answer = ask("/v1/embeddings", input=["ab"] * 700)
    assert len(answer["data"]) == len(engine.requests) == 700


def test_a_text_that_fails_fails_its_request_alone(ask, engine):
    engine.failure = "the model produced NaN"
    assert ask("/v1/embeddings", 500, input=["ab", "c"])["type"] == "server_error"
    engine.failure, engine.submit_error, engine.error_after = None, QueueFullError("full"), 257
    assert ask("/v1/embeddings", 503, input=["ab"] * 300)["type"] == "overloaded_error"


# -- vLLM's others ---------------------------------------------------------------------------------


def test_pooling_gives_arrays_of_any_task(ask, engine):
    engine.result = lambda request: np.ones((2, 3), np.float32)
    answer = ask("/pooling", input="ab", task="token_embed")
    assert answer["data"] == [{"object": "pooling", "index": 0, "data": [[1.0] * 3] * 2}]
    assert engine.requests[0].pooling.params.task == "token_embed"


def test_classify_names_the_best_label(ask, engine):
    engine.result = lambda request: np.array([0.25, 0.75], np.float32)
    answer = ask("/classify", pooling=LABELS, size=2, input=["a", "b"])
    assert answer["data"][1] == {
        "index": 1,
        "label": "good",
        "probs": [0.25, 0.75],
        "num_classes": 2,
    }
    assert "no labels" in ask("/classify", 400, input="a")["message"]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_are_similarities_of_embeddings(ask, engine, path):
    engine.result = lambda request: np.array([1.0, len(request.prompt_token_ids) - 1], np.float32)
    answer = ask(path, text_1="a", text_2=["b", "cd", "a"])
    scores = [entry["score"] for entry in answer["data"]]
    assert scores == pytest.approx([1.0, 2**-0.5, 1.0])
    assert len(engine.requests) == 3  # each text once
    assert {entry["object"] for entry in answer["data"]} == {"score"}


def test_a_cross_encoder_reads_pairs(ask, engine):
    engine.result = lambda request: np.array([len(request.prompt_token_ids)], np.float32)
    answer = ask("/score", pooling=SCORES, size=1, queries=["a", "bb"], documents=["ccc", "d"])
    assert [entry["score"] for entry in answer["data"]] == [4.0, 3.0]
    assert texts_of(engine) == ["accc", "bbd"]
    error = ask("/score", 400, pooling=SCORES, size=1, text_1=["a", "b"], text_2=["c"])
    assert error["param"] == "data_2"
    assert (
        "2 labels" in ask("/score", 400, pooling=LABELS, size=2, text_1="a", text_2="b")["message"]
    )


# -- reranking -------------------------------------------------------------------------------------


@pytest.fixture
def rerank(ask, engine):
    """Documents have their length as their score."""
    engine.result = lambda request: np.array([len(request.prompt_token_ids)], np.float32)
    return partial(ask, pooling=SCORES, size=1)


@pytest.mark.parametrize(
    "path", ["/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking"]
)
def test_documents_are_sorted_by_their_scores(rerank, path):
    documents = ["b", {"text": "bbb"}, "bb"]
    answer = rerank(path, query="a", documents=documents, top_n=2, model="tiny")
    assert answer["results"] == [
        {"index": 1, "relevance_score": 4.0, "document": {"text": "bbb"}},
        {"index": 2, "relevance_score": 3.0, "document": {"text": "bb"}},
    ]
    assert answer["usage"] == {"prompt_tokens": 9, "total_tokens": 9}
    bare = rerank(path, query="a", documents=documents, return_documents=False)
    assert [entry["index"] for entry in bare["results"]] == [1, 2, 0]
    assert "document" not in bare["results"][0]


def test_texts_are_sorted_in_the_form_of_tei(rerank, engine):
    answer = rerank("/rerank", query="a", texts=["b", "bbb"], raw_scores=True, return_text=True)
    assert answer == [
        {"index": 1, "score": 4.0, "text": "bbb"},
        {"index": 0, "score": 2.0, "text": "b"},
    ]
    assert engine.requests[0].pooling.params.use_activation is False


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": [{"image": "x"}]}, "documents.0.text"),
        ({"documents": ["a"]}, "query"),
        ({"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ({"query": "a", "documents": ["b"], "instruction": "find"}, "instruction"),
    ],
)
def test_a_wrong_field_of_a_reranking_is_named(rerank, body, param):
    assert rerank("/rerank", 400, **body)["param"] == param


# -- others ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/embedding", "/embeddings"])
def test_llama_servers_embeddings_are_rows(ask, engine, path):
    answer = ask(path, content=["abc", "d"], embd_normalize=-1)
    assert answer[1] == {"index": 1, "embedding": [vector_of(engine.requests[1]).tolist()]}
    assert engine.requests[0].pooling.params.use_activation is False
    assert ask(path, 400, content="a", embd_normalize=1)["param"] == "embd_normalize"


def test_teis_embeddings_are_a_list_of_vectors(ask, engine):
    answer = ask("/embed", inputs=["abc", "d" * 300], truncate=True, normalize=False)
    assert answer == [vector_of(request).tolist() for request in engine.requests]
    assert len(engine.requests[1].prompt_token_ids) == 256


def test_ollamas_embeddings(ask, engine):
    answer = ask("/api/embed", input=["abc", "d" * 300], model="tiny", keep_alive="5m")
    assert answer["embeddings"] == [vector_of(request).tolist() for request in engine.requests]
    assert answer["prompt_eval_count"] == 3 + 256 and answer["model"] == "tiny"
    assert ask("/api/embeddings", prompt="abc") == {"embedding": answer["embeddings"][0]}
    assert "does not exist" in ask("/api/embed", 404, input="a", model="other")
    assert ask("/api/embed", 400, input=5).startswith("input")
