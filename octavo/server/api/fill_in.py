"""Prompts for what belongs between two texts, of models that have tokens for that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.base.errors import InvalidRequestError
from octavo.server.api.prompts import PromptRenderer
from octavo.text.tokenizer import Tokenizer

# By family: what comes before the text at the left, before that at the right, and before what
# belongs between them; before the name of a repository, and before a file of it.
_FAMILIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"),  # Qwen
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<reponame>", "<file_sep>"),  # StarCoder 2
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>", None, None),  # SantaCoder
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", None, None),  # GLM, CodeGeeX
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", None, None),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>", None, None),  # Code Llama
)


@dataclass(frozen=True)
class FillInTokens:
    """A model's tokens for filling in."""

    prefix: int
    suffix: int
    middle: int
    repository: int | None = None
    file: int | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> FillInTokens | None:
        """Return those of a tokenizer, None if it has none."""
        known = tokenizer.specials.matcher.ids
        for names in _FAMILIES:
            prefix, suffix, middle, *others = (known.get(name or "") for name in names)
            if prefix is not None and suffix is not None and middle is not None:
                return cls(prefix, suffix, middle, *others)
        return None


@dataclass(frozen=True)
class OtherFile:
    """A further file that the model is shown."""

    name: str
    text: str


async def fill_in_prompt(
    prompts: PromptRenderer,
    before: str,
    after: str,
    *,
    begin: Sequence[int] = (),
    files: Sequence[OtherFile] = (),
    field: str = "suffix",
) -> list[int]:
    """Return the prompt for what belongs between two texts.

    Args:
        begin: tokens with which the answer begins, as the client has it.
        files: shown before, where the model has tokens for them, else as they are.
        field: the client's name of the text at the right, for errors.

    Raises:
        InvalidRequestError: the model cannot fill in.
    """
    tokenizer = prompts.tokenizer
    tokens = FillInTokens.of(tokenizer)
    if tokens is None:
        raise InvalidRequestError("this model has no tokens for filling in", field)
    names = [file.name for file in files]
    texts = [file.text for file in files]
    pieces = await prompts.pieces([before, after, *(f"{name}\n" for name in names), *texts, "\n"])
    left, right, *rest = pieces
    token_ids = [] if tokenizer.leading_bos is None else [tokenizer.leading_bos]
    if files and tokens.repository is not None:
        token_ids += [tokens.repository, *rest[-1]]
    for name, text in zip(rest[: len(files)], rest[len(files) : -1], strict=True):
        token_ids += name if tokens.file is None else [tokens.file, *name]
        token_ids += text
    if files and tokens.file is not None:
        token_ids.append(tokens.file)
    return [*token_ids, tokens.prefix, *left, tokens.suffix, *right, tokens.middle, *begin]
