"""Modules of a checkpoint by their names, and the patterns by which configs name some of them.

A ``WeightShape`` has the name that Hugging Face's Llama would have for it; checkpoints of other
families, and of models that also see, say it otherwise: ``model.language_model.layers.3.mlp``,
``backbone.layers.4.mixer.in_proj``, ``mlp.experts.17.up_proj``. Here both come to one spelling:
what stands before ``layers.N.`` goes, and a module has all the names that it is known by.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from octavo.base.linear_regex import Pattern, PatternCompiler, PatternError
from octavo.cost.weight_shape import WeightShape

REGEX = "re:"
_OF_LAYER = re.compile(
    r"(?:model|language_model|backbone|transformer|llm|\.)*(?:layers|h|blocks)\.(\d+)(?:\.|$)"
)
_OUTSIDE = re.compile(r"(?:(?:model|language_model|backbone|transformer|llm)\.)+")
# What families call the parts of a layer, by what they are called here.
_SPELLINGS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("mlp.experts.", ("mlp.experts.0.", "block_sparse_moe.experts.0.", "mixer.experts.0.")),
    ("mlp.experts.", ("feed_forward.experts.0.", "block_sparse_moe.experts.", "moe.experts.0.")),
    ("mlp.shared_expert.", ("mlp.shared_experts.", "mixer.shared_experts.", "share_expert.")),
    ("mlp.shared_expert.", ("block_sparse_moe.shared_experts.", "feed_forward.shared_expert.")),
    ("mlp.latent_in", ("mixer.fc1_latent_proj", "mlp.fc1_latent_proj")),
    ("mlp.latent_out", ("mixer.fc2_latent_proj", "mlp.fc2_latent_proj")),
    ("mlp.gate", ("block_sparse_moe.gate", "mixer.gate", "mlp.router", "feed_forward.router")),
    ("mlp.", ("mixer.", "feed_forward.", "ffn.")),
    ("self_attn.", ("mixer.", "attention.", "attn.")),
    ("mamba.in_proj", ("mixer.in_proj",)),
    ("mamba.", ("mixer.",)),
    ("linear_attn.in_proj_qk", ("linear_attn.in_proj_qkv", "linear_attn.in_proj_qkvz")),
    ("linear_attn.in_proj_v", ("linear_attn.in_proj_qkv", "linear_attn.in_proj_qkvz")),
    ("linear_attn.in_proj_z", ("linear_attn.in_proj_qkvz",)),
    ("linear_attn.in_proj_ba", ("linear_attn.in_proj_a", "linear_attn.in_proj_b")),
)
# Parts of a projection that a checkpoint has in one piece, and pieces by their other names.
_ENDINGS = {
    "q_proj": ("qkv_proj",),
    "k_proj": ("qkv_proj",),
    "v_proj": ("qkv_proj",),
    "gate_proj": ("gate_up_proj", "w1"),
    "up_proj": ("gate_up_proj", "w3"),
    "down_proj": ("w2",),
    "in_proj_zx": ("in_proj",),
    "in_proj_bc": ("in_proj",),
    "in_proj_dt": ("in_proj",),
}


@lru_cache(maxsize=1024)
def names_of(name: str) -> tuple[str, ...]:
    """All names of a module of a layer, by the one that a ``WeightShape`` has."""
    found = [name]
    for ours, theirs in _SPELLINGS:
        if name.startswith(ours):
            found += (other + name.removeprefix(ours) for other in theirs)
    for each in tuple(found):
        stem, _, ending = each.rpartition(".")
        found += (f"{stem}.{other}" for other in _ENDINGS.get(ending, ()))
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class _Glob:
    """Text with stars in it, which stand for anything: it is found within a name, from the
    beginning of one of its words to the end of one."""

    pieces: tuple[str, ...]

    def matches(self, name: str) -> bool:
        dotted = f".{name}."
        first, *others = self.pieces
        at = dotted.find(f".{first}")
        while at >= 0:
            if self._goes_on(dotted, at + 1 + len(first), others):
                return True
            at = dotted.find(f".{first}", at + 1)
        return False

    def _goes_on(self, dotted: str, at: int, others: list[str]) -> bool:
        if not others:
            return dotted.startswith(".", at)
        *between, last = others
        for piece in between:
            at = dotted.find(piece, at)
            if at < 0:
                return False
            at += len(piece)
        return not last or dotted.find(f"{last}.", at) >= 0


@dataclass(frozen=True, slots=True)
class _Regex:
    """A regular expression of a config, which fits from the beginning of a module's name on."""

    pattern: Pattern
    prefixes: tuple[str, ...]

    def matches(self, name: str) -> bool:
        return any(self.pattern.match(prefix + name) for prefix in self.prefixes)


@dataclass(frozen=True)
class ModulePatterns:
    """Modules that a config names: a module itself or what it is within, with stars for anything,
    or ``re:`` and a regular expression.

    Raises:
        PatternError: a regular expression makes no sense.
    """

    patterns: tuple[str, ...] = ()
    _of_layer: dict[int, list[_Glob]] = field(init=False, compare=False, repr=False)
    _anywhere: list[_Glob | _Regex] = field(init=False, compare=False, repr=False)
    _known: dict[tuple[int | None, str], bool] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        of_layer: defaultdict[int, list[_Glob]] = defaultdict(list)
        anywhere: list[_Glob | _Regex] = []
        compiler = PatternCompiler()
        for pattern in self.patterns:
            if pattern.startswith(REGEX):
                anywhere.append(_regex(pattern.removeprefix(REGEX), compiler))
            elif (layer := _OF_LAYER.match(pattern)) is not None:
                of_layer[int(layer[1])].append(_glob(pattern[layer.end() :]))
            else:
                anywhere.append(_glob(_OUTSIDE.sub("", pattern, count=1)))
        for name, value in (("_of_layer", dict(of_layer)), ("_anywhere", anywhere), ("_known", {})):
            object.__setattr__(self, name, value)

    def as_regexes(self) -> list[str]:
        """Names of modules for readers that have octavo's names alone, and regular expressions: the
        page."""
        found = []
        for pattern in self.patterns:
            plain = ".*".join(map(re.escape, pattern.split("*")))
            is_regex = pattern.startswith(REGEX)
            found.append(
                f"^(?:{pattern.removeprefix(REGEX)})" if is_regex else rf"(?:^|\.){plain}(?:\.|$)"
            )
        return found

    def match(self, weight: WeightShape) -> bool:
        """Whether the module of a weight is one of them."""
        key = weight.layer, weight.name
        if key not in self._known:
            self._known[key] = self._matches(weight)
        return self._known[key]

    def _matches(self, weight: WeightShape) -> bool:
        names = names_of(weight.name.removeprefix("model."))
        layer = weight.layer
        if layer is None:
            return _any(self._anywhere, names)
        if any(
            not glob.pieces[0] and len(glob.pieces) == 1 for glob in self._of_layer.get(layer, ())
        ):
            return True  # the whole layer
        if _any(self._of_layer.get(layer, ()), names):
            return True
        return _any(self._anywhere, [f"layers.{layer}.{name}" for name in names])


def _any(patterns: Iterable[_Glob | _Regex], names: Iterable[str]) -> bool:
    return any(pattern.matches(name) for name in names for pattern in patterns)


def _glob(text: str) -> _Glob:
    return _Glob(tuple(text.split("*")))


def _regex(text: str, compiler: PatternCompiler) -> _Regex:
    prefixes = ["model."] if text.startswith((".", "model", "^model")) else ["model.", ""]
    if "language_model" in text:
        prefixes += ["model.language_model.", "language_model.model."]
    if "backbone" in text:
        prefixes.append("backbone.")
    try:
        return _Regex(compiler.compile(text), tuple(prefixes))
    except PatternError as error:
        raise PatternError(f"{text!r:.100} is no regular expression: {error}") from None
