"""The tokenizer of a Hugging Face folder: ``tokenizer.json`` and the files beside it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import ModelFileError
from octavo.text.decoders import (
    ByteDecoder,
    Decoder,
    WindowDecoder,
    byte_level_bytes,
    sentencepiece_bytes,
)
from octavo.text.encoders import LibraryEncoder
from octavo.text.special_tokens import SpecialTokens
from octavo.text.tokenizer import Tokenizer, end_of_turn_ids

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as LibraryTokenizer

MAX_TOKENIZER_BYTES = 256 << 20
MAX_CONFIG_BYTES = 16 << 20
_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def load_folder(folder: Path, extra_stop_ids: Iterable[int] = ()) -> Tokenizer:
    """See ``Tokenizer.from_folder``."""
    library = _load_library(folder / "tokenizer.json")
    config = {
        **_read_object(folder / "special_tokens_map.json"),
        **_read_object(folder / "tokenizer_config.json"),
    }
    _add_configured_tokens(library, config, folder / "tokenizer_config.json")
    keys = [f"{name}_token" for name in _NAMES]
    named = {key: text for key in keys if (text := _content(config.get(key))) is not None}
    ids = {name: library.token_to_id(text) for name, text in named.items()}
    added = library.get_added_tokens_decoder()
    specials = _special_tokens(added)
    vocab_size = _vocab_size(library)
    prefix_ids, suffix_ids = _surroundings(library)
    eos_id = ids.get("eos_token")
    stop_ids = end_of_turn_ids(specials.matcher.ids) | set(extra_stop_ids)
    decoder = _create_decoder(library, vocab_size, frozenset(added))
    return Tokenizer(
        encoder=LibraryEncoder(library, specials, ids.get("unk_token")),
        decoder=decoder,
        specials=specials,
        vocab_size=vocab_size,
        bos_token_id=ids.get("bos_token"),
        eos_token_id=eos_id,
        stop_token_ids=stop_ids if eos_id is None else stop_ids | {eos_id},
        prefix_ids=prefix_ids,
        suffix_ids=suffix_ids,
        named_tokens=named,
        chat_templates=_chat_templates(folder, config),
    )


# -- files ----------------------------------------------------------------------------------------


def _read_text(path: Path, limit: int) -> str:
    try:
        size = path.stat().st_size
        if size > limit:
            raise ModelFileError(path, f"{size:,} bytes; {limit:,} are allowed")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelFileError(path, "not UTF-8", offset=error.start) from error
    except OSError as error:
        raise ModelFileError(path, f"cannot read: {error.strerror or error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(_read_text(path, MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(path, f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(path, "expected a JSON object")
    return value


def _load_library(path: Path) -> LibraryTokenizer:
    from tokenizers import Tokenizer as LibraryTokenizer

    if not path.exists():
        hint = ""
        if (path.parent / "tokenizer.model").exists():
            hint = ": convert tokenizer.model to tokenizer.json, or use a GGUF file of the model"
        raise ModelFileError(path, f"there is no such file{hint}")
    text = _read_text(path, MAX_TOKENIZER_BYTES)
    try:
        library = LibraryTokenizer.from_str(text)
    except Exception as error:
        raise ModelFileError(path, f"not a tokenizer: {error!s:.300}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # how the library's own bugs arrive
            raise
        raise ModelFileError(path, f"not a tokenizer: {error!s:.300}") from None
    library.no_truncation()
    library.no_padding()
    return library


def _content(value: Any) -> str | None:
    """A token in a config: its text, or an object with its text as ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """By name. Files win over the config, as in transformers."""
    templates: dict[str, str] = {}
    configured = config.get("chat_template")
    if isinstance(configured, str):
        templates["default"] = configured
    elif isinstance(configured, list):
        for i, entry in enumerate(configured):
            entry = entry if isinstance(entry, dict) else {}
            name, template = entry.get("name"), entry.get("template")
            if not isinstance(name, str) or not isinstance(template, str):
                field = f"chat_template[{i}]"
                raise ModelFileError(
                    folder / "tokenizer_config.json", "expected a name and a template", field=field
                )
            templates[name] = template
    elif configured is not None:
        raise ModelFileError(
            folder / "tokenizer_config.json", "expected text or a list", field="chat_template"
        )
    if (folder / "chat_template.jinja").exists():
        templates = {"default": _read_text(folder / "chat_template.jinja", MAX_CONFIG_BYTES)}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read_text(path, MAX_CONFIG_BYTES)
    return templates


# -- tokens ---------------------------------------------------------------------------------------


def _add_configured_tokens(library: LibraryTokenizer, config: dict[str, Any], path: Path) -> None:
    """Adds the tokens of ``added_tokens_decoder`` that tokenizer.json lacks or has otherwise."""
    from tokenizers import AddedToken

    field = "added_tokens_decoder"
    entries = config.get(field, {})
    if not isinstance(entries, dict):
        raise ModelFileError(path, "expected an object", field=field)
    known = {i: repr(token) for i, token in library.get_added_tokens_decoder().items()}
    flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
    for key, entry in sorted(entries.items(), key=lambda item: item[0].zfill(12)):
        content = _content(entry)
        if not key.isdecimal() or content is None:
            raise ModelFileError(path, f"entry {key!r:.20} is not a token", field=field)
        token = AddedToken(content, **{f: entry[f] is True for f in flags if f in entry})
        if known.get(int(key)) == repr(token):
            continue
        library.add_tokens([token])
        if library.token_to_id(content) != int(key):
            raise ModelFileError(path, f"token {content!r:.60} cannot have id {key}", field=field)


def _special_tokens(added: dict[int, AddedToken]) -> SpecialTokens:
    special = {i: token for i, token in added.items() if token.special}
    return SpecialTokens(
        {token.content: i for i, token in special.items()},
        strip_left=[i for i, token in special.items() if token.lstrip],
        strip_right=[i for i, token in special.items() if token.rstrip],
    )


def _vocab_size(library: LibraryTokenizer) -> int:
    """One more than the largest id."""
    size = library.get_vocab_size(with_added_tokens=True)
    if library.id_to_token(size - 1) is not None and library.id_to_token(size) is None:
        return size  # ids without holes, almost always; listing them all takes a while
    return 1 + max(library.get_vocab(with_added_tokens=True).values(), default=-1)


def _surroundings(library: LibraryTokenizer) -> tuple[list[int], list[int]]:
    """The ids that the post-processor of tokenizer.json puts before and after a text.

    As in transformers 5, what the config says of BOS and EOS does not count beside that.
    """
    encoding = library.encode("a", add_special_tokens=True)
    inner = [i for i, special in enumerate(encoding.special_tokens_mask) if not special]
    start, end = (inner[0], inner[-1] + 1) if inner else (len(encoding.ids),) * 2
    return encoding.ids[:start], encoding.ids[end:]


# -- decoding -------------------------------------------------------------------------------------


def _create_decoder(
    library: LibraryTokenizer, vocab_size: int, added_ids: frozenset[int]
) -> Decoder:
    """The decoder for what tokenizer.json says about decoding.

    Recognized are byte-level decoding and SentencePiece's steps; anything else goes through the
    library.
    """

    def token(token_id: int) -> str | None:
        return library.id_to_token(token_id) if 0 <= token_id < vocab_size else None

    steps = json.loads(library.decoder.__getstate__()) if library.decoder is not None else {}
    if steps.get("type") == "Sequence":
        kinds = [step.get("type") for step in steps.get("decoders", ())]
    else:
        kinds = [steps.get("type")]
    if kinds == ["ByteLevel"]:
        return ByteDecoder(token, byte_level_bytes, added_ids)
    strip_space = kinds[-1:] == ["Strip"] and steps["decoders"][-1] == {
        "type": "Strip",
        "content": " ",
        "start": 1,
        "stop": 0,
    }
    if kinds[: len(kinds) - strip_space] == ["Replace", "ByteFallback", "Fuse"]:
        replace = steps["decoders"][0]
        if (replace.get("pattern"), replace.get("content")) == ({"String": "\u2581"}, " "):
            return ByteDecoder(token, sentencepiece_bytes, strip_space=strip_space)
    return WindowDecoder(token, lambda ids: library.decode(list(ids), skip_special_tokens=False))
