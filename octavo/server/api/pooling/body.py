"""Fields of bodies that ask for vectors and scores."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from octavo.server.api.fields import (
    MAX_INT,
    MAX_TIMEOUT,
    Body,
    Label,
    NoEffect,
    Only,
    RequestId,
    TokenIds,
    Unsupported,
)

MAX_INPUTS = 2048  # of a request, as OpenAI's API has it
MAX_CHARS = 1 << 20  # of a text
MAX_TOKENS = 1 << 18  # of a list

Text = Annotated[str, Field(max_length=MAX_CHARS)]
Ids = Annotated[list[int], TokenIds(MAX_TOKENS, least=1)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
_ListsOfIds = Annotated[list[Ids], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]


def _kind_of_input(value: Any) -> str | None:
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list) or not value:
        return "texts"
    first = value[0]
    if isinstance(first, list):
        return "lists"
    return "ids" if isinstance(first, int) else "texts"


# A text, several, the token ids of one, or of several.
Input = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[Texts, Tag("texts")]
    | Annotated[Ids, Tag("ids")]
    | Annotated[_ListsOfIds, Tag("lists")],
    Discriminator(_kind_of_input),
]
TextOrTexts = Annotated[
    Annotated[Text, Tag("text")] | Annotated[Texts, Tag("texts")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "texts"),
]


def inputs_of(given: Any) -> list[Any]:
    """Return the texts, or lists of token ids, of an `Input`."""
    is_one = isinstance(given, str) or isinstance(given[0], int)
    return [given] if is_one else list(given)


class PoolingFields(Body):
    """Fields of all bodies that ask for vectors or scores."""

    model: str | None = Field(None, description="any of /v1/models; it may be left out")
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        le=MAX_INT,
        description="the most tokens of a text, which loses its end; -1: the model's most",
    )
    truncation_side: Annotated[Any, Only(("right",))] = None
    timeout: float | None = Field(None, gt=0, le=MAX_TIMEOUT, description="seconds")
    priority: int | None = Field(None, ge=-MAX_INT, le=MAX_INT, description="lower is sooner (0)")
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    request_id: RequestId | None = Field(None, description="becomes part of the answer's id")
    use_activation: bool | None = Field(
        None,
        description="scale embeddings to length 1; make scores by the model's sigmoid or softmax "
        "(as the model's files say)",
    )

    user: Annotated[Label | None, NoEffect] = None
    padding: Annotated[Any, NoEffect] = None  # texts are packed without any
    mm_processor_kwargs: Unsupported = None


class EncodingFields(PoolingFields):
    """Fields of bodies whose answers have vectors."""

    synonyms = {"normalize": "use_activation", "output_dimension": "dimensions"}

    dimensions: int | None = Field(
        None, ge=1, le=MAX_INT, description="the first so many values of each (all)"
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64 is of float32, the lowest byte first (float)"
    )
    add_special_tokens: bool | None = Field(
        None, description="put the tokens around a text that the model wants (yes)"
    )
    prompt_name: str | None = Field(
        None, max_length=256, description="of the model's files: the text to go before each"
    )
    embed_dtype: Annotated[Any, Only(("float32",))] = None
    endianness: Annotated[Any, Only(("native", "little"))] = None
    # Of vLLM's conversations, which are texts by the chat template.
    messages: Unsupported = None


class EmbeddingRequest(EncodingFields):
    """Texts to embed."""

    input: Input


class PoolingRequest(EncodingFields):
    """Texts to pool."""

    input: Input
    task: Literal["embed", "token_embed", "classify"] | None = None


class ClassifyRequest(PoolingFields):
    """Texts whose labels are to be scored."""

    input: Input
    add_special_tokens: bool | None = None
    messages: Unsupported = None


class Document(Body):
    """A document as an object."""

    text: Text


DocumentText = Annotated[
    Annotated[Text, Tag("text")] | Annotated[Document, Tag("object")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "object"),
]
Documents = Annotated[
    list[DocumentText], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)
]


class RerankRequest(PoolingFields):
    """A query, and documents to sort by how well they answer it."""

    query: Text
    documents: Documents
    top_n: int | None = Field(None, ge=0, le=MAX_INT, description="0: all")
    return_documents: bool | None = Field(None, description="the texts too (yes)")
    max_tokens_per_doc: Annotated[Any, Only((0,))] = None
    max_tokens_per_query: Annotated[Any, Only((0,))] = None
    max_chunks_per_doc: Annotated[Any, Only((1,))] = None
    rank_fields: Unsupported = None
    instruction: Unsupported = None
    chat_template_kwargs: Unsupported = None


class TeiRerankRequest(PoolingFields):
    """The same with the fields of text-embeddings-inference."""

    query: Text
    texts: Texts
    raw_scores: bool | None = Field(None, description="as the model gives them, without a sigmoid")
    return_text: bool | None = None
    truncate: bool | None = None
    truncation_direction: Annotated[Any, Only(("Right", "right"))] = None


class ScoreRequest(PoolingFields):
    """Pairs of texts to score: of a list with another, of which one may be a single text."""

    synonyms = {
        "text_1": "data_1",
        "text_2": "data_2",
        "queries": "data_1",
        "documents": "data_2",
        "items": "data_2",
    }

    data_1: TextOrTexts
    data_2: TextOrTexts
    max_tokens_per_doc: Annotated[Any, Only((0,))] = None
    max_tokens_per_query: Annotated[Any, Only((0,))] = None
    instruction: Unsupported = None
    chat_template_kwargs: Unsupported = None


class LlamaEmbeddingRequest(PoolingFields):
    """Texts to embed, with the fields of llama.cpp's server."""

    synonyms = {"input": "content"}

    content: Input
    embd_normalize: Annotated[Any, Only((2, -1))] = Field(
        None, description="2: to length 1; -1: not at all (as the model's files say)"
    )
    encoding_format: Literal["float", "base64"] | None = None


class TeiEmbedRequest(PoolingFields):
    """Texts to embed, with the fields of text-embeddings-inference."""

    inputs: Input
    normalize: bool | None = None
    truncate: bool | None = None
    truncation_direction: Annotated[Any, Only(("Right", "right"))] = None
    prompt_name: str | None = Field(None, max_length=256)
    dimensions: int | None = Field(None, ge=1, le=MAX_INT)


class OllamaEmbedRequest(PoolingFields):
    """Texts to embed, with the fields of Ollama's ``/api/embed``."""

    input: TextOrTexts
    truncate: bool | None = Field(None, description="cut texts that are too long (yes)")
    dimensions: int | None = Field(None, ge=1, le=MAX_INT)
    options: Annotated[Any, NoEffect] = None
    keep_alive: Annotated[Any, NoEffect] = None


class OllamaEmbeddingsRequest(PoolingFields):
    """A text to embed, with the fields of Ollama's ``/api/embeddings``."""

    prompt: Text
    options: Annotated[Any, NoEffect] = None
    keep_alive: Annotated[Any, NoEffect] = None


# -- answers ---------------------------------------------------------------------------------------


class Usage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingData(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingResponse(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingData]
    usage: Usage


class PoolingData(BaseModel):
    object: Literal["pooling"]
    index: int
    data: list[float] | list[list[float]] | str


class PoolingResponse(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PoolingData]
    usage: Usage


class ClassifyData(BaseModel):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyResponse(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ClassifyData]
    usage: Usage


class ScoreData(BaseModel):
    object: Literal["score"]
    index: int
    score: float


class ScoreResponse(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreData]
    usage: Usage


class RerankResult(BaseModel):
    index: int
    relevance_score: float
    document: dict[str, str] | None = None


class RerankResponse(BaseModel):
    id: str
    object: Literal["list"]
    model: str
    results: list[RerankResult]
    usage: Usage


class TeiRank(BaseModel):
    index: int
    score: float
    text: str | None = None


class LlamaEmbedding(BaseModel):
    index: int
    embedding: list[list[float]] | str


class OllamaEmbedResponse(BaseModel):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsResponse(BaseModel):
    embedding: list[float]
