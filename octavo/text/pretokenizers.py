"""Rules by which text is cut into words before byte-level BPE, by ``tokenizer.ggml.pre``.

A GGUF file names its pre-tokenizer instead of carrying it. The patterns here are those of the
models' own ``tokenizer.json`` files, under the names that llama.cpp gives them. Each pattern cuts
every piece that the patterns before it left; what a pattern does not match stays a piece.

Text is not trusted, so the time of a pattern must grow with the text's length and not with its
square, whatever the text is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# A run of one class of characters up to an end: of the text, or with ``$`` of a line.
_RUN_TO_END = re.compile(r"(\\s|\\p\{\^?\w+\}|\[(?:[^\[\]\\&]|\\.)+\])\+(?:\$|\\z|\\Z)")


def in_linear_time(pattern: str) -> str:
    """Return an equal pattern that takes linear time, if ``pattern`` would take quadratic time.

    ``\\s+$`` scans all of a run of spaces that does not end the text, in vain, and then again from
    its second space, and from its third. A match from inside a run is never longer than the one
    from its first character, so a match is only tried there.
    """
    run = _RUN_TO_END.fullmatch(pattern)
    return pattern if run is None else f"(?<!{run[1]}){pattern}"


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = (
    r"'s|'t|'re|'ve|'m|'ll|'d"
    r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)
_DIGIT = r"\p{N}"


def _cl100k(number: str) -> str:
    """Return the pattern of Llama 3, Qwen 2 and similar ones, which differ in how digits are
    grouped."""
    return (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{number}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _o200k(number: str, contraction: str) -> str:
    """Return the pattern of GPT-4o and Tekken: a word breaks where lower case turns to upper."""
    upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
    lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{upper}*{lower}+{contraction}|{lead}{upper}+{lower}*{contraction}|{number}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED_CODER = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# DeepSeek's older models spell out the cased letters of one Unicode version, and their range for
# punctuation, ``:-~``, takes in the letters of ASCII: that is how they were trained.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_CJK_OR_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    in_linear_time(r"\s+$"),
    _CJK_OR_HANGUL,
    _DIGIT,
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_OR_HANGUL, _DIGIT)


@dataclass(frozen=True)
class PreTokenizer:
    """The preparation of text by one family of byte-level BPE models.

    ``patterns``: Oniguruma regular expressions, applied one after the other.
    ``nfc``: text is brought into Unicode form NFC first.
    ``ignore_merges``: a word that is a token by itself is taken whole, whatever the merges say.
    ``add_bos``: a prompt begins with BOS unless ``tokenizer.ggml.add_bos_token`` says otherwise.
    ``has_bos``: False where the family has no BOS token although the file may name one.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False
    has_bos: bool = True


_FAMILIES: dict[PreTokenizer, str] = {
    # llama.cpp's rules for files that name no pre-tokenizer.
    PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")): "default",
    PreTokenizer((_GPT2,)): (
        "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 jais trillion granite-docling"
    ),
    PreTokenizer((_GPT2,), nfc=True): "mpt olmo",
    PreTokenizer((_DIGIT, _GPT2)): ("smollm starcoder refact codeshell exaone minerva-7b mellum2"),
    PreTokenizer((_DIGIT, _GPT2), nfc=True): "command-r",
    PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")): "falcon",
    PreTokenizer((_cl100k(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True): (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2"
    ),
    PreTokenizer((_cl100k(r"\p{N}{1,3}"),)): "dbrx smaug-bpe",
    PreTokenizer((_cl100k(r"\p{N}{1,3}"),), has_bos=False): "chatglm-bpe glm4",
    PreTokenizer((_cl100k(r"\p{N}"),), nfc=True): "qwen2 deepseek-r1-qwen megrez",
    PreTokenizer((_cl100k(r"\p{N}"),)): "stablelm2 hunyuan solar-open grok-2",
    PreTokenizer((_QWEN35,), nfc=True): "qwen35",
    PreTokenizer(_DEEPSEEK_LLM): "deepseek-llm",
    PreTokenizer(_DEEPSEEK_CODER): "deepseek-coder",
    PreTokenizer((r"\p{N}{1,3}", _CJK, _DEEPSEEK_V3)): "deepseek-v3 hunyuan-dense joyai-llm",
    PreTokenizer((_o200k(r"\p{N}", ""),), ignore_merges=True, add_bos=True): "tekken",
    PreTokenizer((_o200k(r"\p{N}{1,3}", f"{_CONTRACTION}?"),)): (
        "gpt-4o llama4 kanana2 minimax-m2"
    ),
    PreTokenizer((_SEED_CODER,)): "seed-coder",
    PreTokenizer((_BAILING,)): "bailingmoe bailingmoe2 llada-moe",
    PreTokenizer((_BLOOM,)): "bloom poro-chat gpt3-finnish",
    PreTokenizer((_BLOOM, _DIGIT)): "viking",
}

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    name: family for family, names in _FAMILIES.items() for name in names.split()
}
