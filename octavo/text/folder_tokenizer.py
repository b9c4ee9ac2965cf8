"""The tokenizer of a Hugging Face folder, from ``tokenizer.json`` and the files beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.base.errors import ModelFileError
from octavo.base.fields import Fields
from octavo.base.model_files import ModelFolder, read_text
from octavo.text.decoders import (
    ByteDecoder,
    Decoder,
    WindowDecoder,
    byte_level_bytes,
    sentencepiece_bytes,
)
from octavo.text.encoders import LibraryEncoder, library_errors
from octavo.text.pretokenizers import in_linear_time
from octavo.text.special_tokens import SpecialTokens, end_of_turn_ids
from octavo.text.tokenizer import PairTemplate, Tokenizer

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as LibraryTokenizer

MAX_TOKENIZER_BYTES = 256 << 20
MAX_TEMPLATE_BYTES = 16 << 20
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_MORE_TEMPLATES = "additional_chat_templates", "*.jinja"
_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def load_folder_tokenizer(folder: Path, *, extra_stop_ids: Iterable[int] = ()) -> Tokenizer:
    """Load ``tokenizer.json`` and the files beside it; a ModelFileError says what is wrong.

    ``extra_stop_ids``: further ids that end an output (generation_config.json has them).
    """
    with library_errors(folder / "tokenizer.json"):
        own = open_library(folder)
        added = own.library.get_added_tokens_decoder()
        vocab_size = _vocab_size(own.library)
        decoder = _create_decoder(own.library, vocab_size, frozenset(added))
        specials = _special_tokens(added)
        encoder = LibraryEncoder(own.library, specials, own.ids.get("unk"))
    eos_id = own.ids.get("eos")
    stop_ids = end_of_turn_ids(specials.matcher.ids) | set(extra_stop_ids)
    return Tokenizer(
        encoder=encoder,
        decoder=decoder,
        specials=specials,
        vocab_size=vocab_size,
        bos_token_id=own.ids.get("bos"),
        eos_token_id=eos_id,
        stop_token_ids=frozenset(stop_ids if eos_id is None else stop_ids | {eos_id}),
        prefix_ids=own.prefix_ids,
        suffix_ids=own.suffix_ids,
        pair_template=own.pair_template,
        named_tokens=own.named,
        chat_templates=chat_templates(own.files, own.config),
    )


class FolderLibrary(NamedTuple):
    """A folder as the ``tokenizers`` library reads it.

    ``config``: the tokenizer's config, from all files. ``named``: the texts of named tokens, by
    names such as ``bos_token``; ``ids``: their ids, by names such as ``bos``. ``prefix_ids``,
    ``suffix_ids``: the ids before and after a text; ``pair_template``: around two.
    """

    library: LibraryTokenizer
    files: ModelFolder
    config: dict[str, Any]
    named: dict[str, str]
    ids: dict[str, int]
    prefix_ids: list[int]
    suffix_ids: list[int]
    pair_template: PairTemplate | None


def open_library(folder: Path) -> FolderLibrary:
    """Read a folder. Call it within ``library_errors``: the library may refuse the files."""
    files = ModelFolder(folder)
    config = {
        **(files.read_json("special_tokens_map.json") or {}),
        **(files.read_json("tokenizer_config.json") or {}),
    }
    keys = [f"{name}_token" for name in _NAMES]
    named = {key: text for key in keys if (text := _content(config.get(key))) is not None}
    library = _load_library(files)
    _add_configured_tokens(library, Fields(folder / "tokenizer_config.json", config))
    ids = {
        key.removesuffix("_token"): token_id
        for key, text in named.items()
        if (token_id := library.token_to_id(text)) is not None
    }
    surroundings = _surroundings(library)
    return FolderLibrary(library, files, config, named, ids, *surroundings, _pair_of(library))


# -- files ----------------------------------------------------------------------------------------


def tokenizer_files(files: ModelFolder) -> list[Path]:
    """Every file that is read here of a folder."""
    found = [path for name in _FILES if (path := files.find(name)) is not None]
    return [*found, *files.find_all(*_MORE_TEMPLATES)]


def _load_library(files: ModelFolder) -> LibraryTokenizer:
    from tokenizers import Tokenizer as LibraryTokenizer

    path = files.path / "tokenizer.json"
    text = files.read_text(path.name, MAX_TOKENIZER_BYTES)
    if text is None:
        hint = ""
        if (files.path / "tokenizer.model").exists():
            hint = ": convert tokenizer.model to tokenizer.json, or use a GGUF file of the model"
        elif any(files.path.glob("*.tiktoken")) or (files.path / "tiktoken.model").exists():
            hint = (
                ", but a vocabulary of tiktoken, whose rules of splitting are in code that is not "
                "run: take a tokenizer.json of the same model, or use a GGUF file of it"
            )
        raise ModelFileError(path, f"there is no such file{hint}")
    library = LibraryTokenizer.from_str(text)
    library.no_truncation()
    library.no_padding()
    for part in ("normalizer", "pre_tokenizer"):
        _rewrite_patterns(library, part)
    return library


def _rewrite_patterns(library: LibraryTokenizer, part: str) -> None:
    """Replace regular expressions that are slow on some texts; see ``in_linear_time``."""
    if (own := getattr(library, part)) is None:
        return
    state = json.loads(own.__getstate__(), object_hook=_with_linear_pattern)
    if state != json.loads(own.__getstate__()):
        own.__setstate__(json.dumps(state).encode())
        setattr(library, part, own)


def _with_linear_pattern(entry: dict[str, Any]) -> dict[str, Any]:
    pattern = entry.get("Regex")
    return {"Regex": in_linear_time(pattern)} if isinstance(pattern, str) else entry


def _content(value: Any) -> str | None:
    """Return the text of a token in a config: a text, or an object with ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def chat_templates(files: ModelFolder, config: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates of a folder by name. Files win over the config, as in
    transformers."""
    fields = Fields(files.path / "tokenizer_config.json", config)
    templates: dict[str, str] = {}
    configured = fields.raw("chat_template")
    if isinstance(configured, str):
        templates["default"] = configured
    elif configured is not None:
        for entry in fields.each("chat_template", Fields.section):
            templates[entry.text("name")] = entry.text("template")
    whole = files.read_text("chat_template.jinja", MAX_TEMPLATE_BYTES)
    if whole is not None:
        templates = {"default": whole}
    for path in files.find_all(*_MORE_TEMPLATES):
        templates[path.stem] = read_text(path, MAX_TEMPLATE_BYTES)
    return templates


# -- tokens ---------------------------------------------------------------------------------------


def _add_configured_tokens(library: LibraryTokenizer, config: Fields) -> None:
    """Add the tokens of ``added_tokens_decoder`` that tokenizer.json lacks or has otherwise."""
    from tokenizers import AddedToken

    entries = config.section("added_tokens_decoder", {})
    known = {i: repr(token) for i, token in library.get_added_tokens_decoder().items()}
    flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
    for key in sorted(entries, key=lambda key: key.zfill(12)):
        entry = entries.section(key)
        if not re.fullmatch("[0-9]{1,9}", key):
            raise entries.error(key, "is not the id of a token")
        content = entry.text("content")
        token = AddedToken(content, **{f: entry.raw(f) is True for f in flags if f in entry})
        if known.get(int(key)) == repr(token):
            continue
        library.add_tokens([token])
        if library.token_to_id(content) != int(key):
            raise entries.error(key, f"the token {content!r:.60} cannot have this id")


def _special_tokens(added: dict[int, AddedToken]) -> SpecialTokens:
    special = {i: token for i, token in added.items() if token.special}
    return SpecialTokens(
        {token.content: i for i, token in special.items()},
        strip_left=[i for i, token in special.items() if token.lstrip],
        strip_right=[i for i, token in special.items() if token.rstrip],
    )


def _vocab_size(library: LibraryTokenizer) -> int:
    """Return one more than the largest id."""
    size = library.get_vocab_size(with_added_tokens=True)
    if library.id_to_token(size - 1) is not None and library.id_to_token(size) is None:
        return size  # ids without holes, almost always; listing them all takes a while
    return 1 + max(library.get_vocab(with_added_tokens=True).values(), default=-1)


def _surroundings(library: LibraryTokenizer) -> tuple[list[int], list[int]]:
    """Return the ids that the post-processor of tokenizer.json puts before and after a text.

    As in transformers 5, the config's settings of BOS and EOS do not count beside that.
    """
    encoding = library.encode("a", add_special_tokens=True)
    inner = [i for i, special in enumerate(encoding.special_tokens_mask) if not special]
    start, end = (inner[0], inner[-1] + 1) if inner else (len(encoding.ids),) * 2
    return encoding.ids[:start], encoding.ids[end:]


def _pair_of(library: LibraryTokenizer) -> PairTemplate | None:
    """Return what the post-processor puts around two texts; None if it leaves tokens of either
    out."""
    encoding = library.encode("a", "b", add_special_tokens=True)
    own, ids, types = encoding.sequence_ids, encoding.ids, encoding.type_ids
    if 0 not in own or 1 not in own:
        return None
    first, second = own.index(0), own.index(1)
    first_end, second_end = len(own) - own[::-1].index(0), len(own) - own[::-1].index(1)
    if first_end > second:
        return None

    def type_of(start: int, end: int) -> int:
        return int(types[start]) if end > start else 0

    cuts = (0, first, first_end, second, second_end, len(own))
    return PairTemplate(
        tuple(ids[:first]),
        tuple(ids[first_end:second]),
        tuple(ids[second_end:]),
        (
            type_of(*cuts[0:2]),
            type_of(*cuts[1:3]),
            type_of(*cuts[2:4]),
            type_of(*cuts[3:5]),
            type_of(*cuts[4:6]),
        ),
    )


# -- decoding -------------------------------------------------------------------------------------


def _create_decoder(
    library: LibraryTokenizer, vocab_size: int, added_ids: frozenset[int]
) -> Decoder:
    """Return the decoder that does what tokenizer.json says about decoding.

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
