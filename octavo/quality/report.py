"""Quality and speed of a quantized model, measured beside the model that it was made of.

Quality is that of ``octavo perplexity``, with every token of a window scored; with exact
activations and the KV cache, so that only the weights are judged. Speed is that of one stream with
the default settings, of both models in turns, so that a shared machine slows down both.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.quality.logit_file import LogitFile
from octavo.quality.perplexity import PerplexityResult, engine_args, measure
from octavo.quality.windows import ScoringWindows, cut, tokenize

if TYPE_CHECKING:
    from octavo.bench.offline.session import OfflineSession

CTX = 512
MAX_TOKENS = 6 * CTX
_PROMPT, _ANSWER, _ROUNDS = 256, 64, 3

_EXACT = {"activations": "int16", "kv_cache_dtype": "f32"}

# Called with the current task.
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """The report on a model. ``tokens`` of ``text`` were scored. KL divergences are from the base,
    in nats; ``same_top`` is the share of tokens that both rate most probable; speeds are tokens/s
    of one stream. ``served_…``: of the model with the activations and KV that it is served with by
    default, from the exact base."""

    text: str
    tokens: int
    perplexity: float
    base_perplexity: float
    kl_mean: float
    kl_p99: float
    same_top: float
    decode_tps: float
    prefill_tps: float
    base_decode_tps: float
    base_prefill_tps: float
    served_perplexity: float
    served_kl_mean: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def built_in_text() -> tuple[str, str]:
    """Return the name and the content of octavo's own text: about 4,000 tokens that no calibration
    has seen."""
    return "built-in", (files(__package__) / "report_text.txt").read_text("utf-8")


class QuantizationJudge:
    """Compares models with the one that they were made of, which is scored once.

    Args:
        base: a model that octavo runs.
        text: a name for it, and its content, which is scored up to ``max_tokens``.
        engine: settings of the engines that both models run in.

    Raises:
        BenchmarkError: the text is shorter than a window.
        ModelError, ConfigError: see ``LLM``.
    """

    def __init__(
        self,
        base: str,
        text: tuple[str, str],
        max_tokens: int = MAX_TOKENS,
        say: Say = lambda _: None,
        **engine: Any,
    ):
        self._base, self._engine, self._say = base, engine, say
        self._text, content = text
        self._folder = tempfile.TemporaryDirectory(prefix="octavo-report-")
        say(f"scoring {base}")
        with self._open(base, **_EXACT) as session:
            token_ids, bos = tokenize(content, session.tokenizer)
            windows = cut(token_ids, bos_token_id=bos, ctx=CTX, score="all", max_tokens=max_tokens)
            self._windows: ScoringWindows = windows
            scored = self._score(session, base, save_base=self._file)
        self._base_perplexity = scored.scores.perplexity.value

    def report(self, model: str) -> QuantizationReport:
        quality = self.quality(model)
        self._say(f"timing {model} and {self._base}")
        return QuantizationReport(**quality, **self._speeds(model))

    def quality(self, model: str) -> dict[str, Any]:
        """Return the fields of a report except for speeds."""
        self._say(f"scoring {model}")
        with self._open(model, **_EXACT) as session:
            scored = self._score(session, model, base=LogitFile(self._file))
        with self._open(model) as session:
            served = self._score(session, model, base=LogitFile(self._file))
        divergence = scored.divergence
        assert divergence is not None and served.divergence is not None
        return {
            "text": self._text,
            "tokens": self._windows.num_scored,
            "perplexity": scored.scores.perplexity.value,
            "base_perplexity": self._base_perplexity,
            "kl_mean": divergence.kl.value,
            "kl_p99": divergence.kl_p99,
            "same_top": divergence.same_top.value,
            "served_perplexity": served.scores.perplexity.value,
            "served_kl_mean": served.divergence.kl.value,
        }

    def close(self) -> None:
        self._folder.cleanup()

    def __enter__(self) -> QuantizationJudge:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def _file(self) -> Path:
        return Path(self._folder.name) / "base.logits"

    def _open(self, model: str, **settings: Any) -> OfflineSession:
        from octavo.bench.offline.session import OfflineSession

        return OfflineSession(engine_args(model, CTX, **{**settings, **self._engine}))

    def _score(self, session: OfflineSession, model: str, **files: Any) -> PerplexityResult:
        return measure(session.loaded.text_engine, self._windows, model=model, **files)

    def _speeds(self, model: str) -> dict[str, Any]:
        from octavo.bench.offline.latency import one_stream

        found: dict[str, list[float]] = {}
        with self._open(model) as made, self._open(self._base) as base:
            for number in range(_ROUNDS + 1):  # the first to warm up
                for prefix, session in (("", made), ("base_", base)):
                    sample = one_stream(session, _PROMPT, _ANSWER, seed=number)
                    found.setdefault(f"{prefix}prefill_tps", []).append(sample.prefill_tps)
                    found.setdefault(f"{prefix}decode_tps", []).append(sample.decode_tps or 0.0)
        return {name: statistics.median(values[1:]) for name, values in found.items()}
