"""Writes the tokenizer files of a Hugging Face folder from the metadata of a GGUF file.

``tokenizer.json`` says in full what GGUF metadata only names: how text is cut into words, and in
which order pieces are merged. The ids are those that octavo gives for the metadata, but for one
case: where texts get a space before them, ``tokenizer.json`` puts one behind a user-defined token
too, as the models' own tokenizers do, and llama.cpp does not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.base.errors import UnsupportedModelError
from octavo.text.encoders import library_errors
from octavo.text.gguf_tokenizer import (
    TokenType,
    Vocabulary,
    added_ids,
    byte_level_family,
    byte_level_library,
    chat_templates,
    merge_order,
    name_sentencepiece_ids,
    special_tokens,
)
from octavo.text.spm_encoder import SPACE

if TYPE_CHECKING:
    from tokenizers import Tokenizer as LibraryTokenizer

# By GGUF's names of the ids. Language models have no tokens that separate or classify texts.
_NAMES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}


def tokenizer_files(metadata: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Return the files of a tokenizer, as texts by name.

    Args:
        metadata: of a GGUF file.
        path: of that file, for errors.

    Raises:
        ModelFileError: the metadata is damaged.
        UnsupportedModelError: octavo does not have this kind of tokenizer, or ``tokenizer.json``
            cannot describe it.
    """
    vocabulary = Vocabulary(metadata, path)
    model = vocabulary.fields.text("model")
    with library_errors(path):
        if model == "gpt2":
            library, added = _byte_level(vocabulary)
        elif model == "llama":
            library, added = _sentencepiece(vocabulary)
        else:
            raise UnsupportedModelError(f"{path}: there is no tokenizer.json for {model!r:.40}")
        _add_specials(library, vocabulary)
        _surround(library, vocabulary, **added)
        text = library.to_str()
    config = json.dumps(_config(vocabulary), ensure_ascii=False, indent=2)
    return {"tokenizer.json": text, "tokenizer_config.json": config + "\n"}


def _byte_level(vocabulary: Vocabulary) -> tuple[LibraryTokenizer, dict[str, list[int]]]:
    """Return the library's tokenizer without special tokens, and the ids that go around a
    prompt."""
    from tokenizers import decoders

    family = byte_level_family(vocabulary)
    if not family.has_bos:
        vocabulary.ids.pop("bos", None)
    library = byte_level_library(vocabulary, family)
    library.decoder = decoders.ByteLevel()
    return library, added_ids(vocabulary, add_bos=family.add_bos)


def _sentencepiece(vocabulary: Vocabulary) -> tuple[LibraryTokenizer, dict[str, list[int]]]:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    name_sentencepiece_ids(vocabulary)
    fields, tokens = vocabulary.fields, list(vocabulary.tokens)
    for i in np.flatnonzero(vocabulary.types == TokenType.USER_DEFINED).tolist():
        tokens[i] = _as_piece(tokens[i])
    if fields.boolean("remove_extra_whitespaces", False):
        raise UnsupportedModelError(
            f"{vocabulary.path}: a tokenizer that takes spaces away cannot be a tokenizer.json"
        )
    unknown = vocabulary.ids.get("unknown")
    library = Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            _merges(vocabulary),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [normalizers.Replace(" ", SPACE)]
    undo: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    has_prefix = fields.boolean("add_space_prefix", True)
    if has_prefix:
        steps.insert(0, normalizers.Prepend(SPACE))
        undo.append(decoders.Strip(" ", 1, 0))
    library.normalizer = normalizers.Sequence(steps)
    library.decoder = decoders.Sequence(undo)
    user_defined = [_as_piece(text) for text in vocabulary.by_type(TokenType.USER_DEFINED)]
    if has_prefix and any(SPACE in text for text in user_defined):
        raise UnsupportedModelError(
            f"{vocabulary.path}: user-defined tokens with spaces, in a tokenizer that puts a "
            "space before a text, cannot be in a tokenizer.json"
        )
    # Without a prefix they are looked for in text whose spaces are written as pieces write them.
    library.add_tokens([AddedToken(text, normalized=not has_prefix) for text in user_defined])
    return library, added_ids(vocabulary, add_bos=True)


def _as_piece(text: str) -> str:
    return text.replace(" ", SPACE)


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return every way in which two pieces make a third, by the score of the third, best first."""
    order = merge_order(vocabulary.numbers("scores", "fiu"))
    tokens = vocabulary.tokens
    normal = np.flatnonzero(vocabulary.types == TokenType.NORMAL).tolist()
    pieces = {tokens[i]: i for i in normal}
    found = []
    for piece, i in pieces.items():
        for cut in range(1, len(piece)):
            left, right = pieces.get(piece[:cut]), pieces.get(piece[cut:])
            if left is not None and right is not None:
                found.append((order[i], left, right))
    found.sort()
    return [(tokens[left], tokens[right]) for _, left, right in found]


def _add_specials(library: LibraryTokenizer, vocabulary: Vocabulary) -> None:
    from tokenizers import AddedToken

    specials = special_tokens(vocabulary)
    library.add_special_tokens(
        [
            AddedToken(text, normalized=False, special=True, rstrip=i in specials.strip_right)
            for text, i in sorted(vocabulary.specials.items(), key=lambda item: item[1])
            if text
        ]
    )


def _surround(
    library: LibraryTokenizer,
    vocabulary: Vocabulary,
    prefix_ids: list[int],
    suffix_ids: list[int],
) -> None:
    """Have the library put ids before and after a text."""
    from tokenizers import processors

    if not prefix_ids and not suffix_ids:
        return
    tokens = vocabulary.tokens
    before, after = ([tokens[i] for i in ids] for ids in (prefix_ids, suffix_ids))
    library.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B", *after],
        special_tokens=[(tokens[i], i) for i in sorted({*prefix_ids, *suffix_ids})],
    )


def _config(vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the contents of ``tokenizer_config.json``."""
    templates = chat_templates(vocabulary)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**30,  # transformers' value for no limit
    }
    for theirs, ours in _NAMES.items():
        if theirs in vocabulary.ids:
            config[f"{ours}_token"] = vocabulary.tokens[vocabulary.ids[theirs]]
    if set(templates) == {"default"}:
        config["chat_template"] = templates["default"]
    elif templates:
        config["chat_template"] = [
            {"name": name, "template": template} for name, template in templates.items()
        ]
    return config
