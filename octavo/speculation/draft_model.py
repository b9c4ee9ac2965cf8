"""The ``draft_model`` method, a smaller model as the drafter (Leviathan et al., ICML 2023).

It is loaded as any other model, and runs between the steps of the target, on the same threads. Its
KV pool is its own, with the block ids of the target's (``draft_kv.py``).
"""

from __future__ import annotations

from dataclasses import replace

from octavo import hub
from octavo.runtime.capacity import RankLimits
from octavo.settings.speculation import SpeculativeConfig
from octavo.sources.open import open_source
from octavo.speculation.autoregressive import AutoregressiveLimits, AutoregressiveProposer
from octavo.speculation.draft_kv import DraftKV
from octavo.speculation.drafter import TargetModel
from octavo.speculation.vocabulary import Translation, check_same_vocabulary

# Defaults of the config.
_NUM_TOKENS = 5
_MIN_PROBABILITY = 0.5


class DraftModel:
    """A ``Drafter`` that loads the model ``config.model``.

    Raises:
        ModelError: the model cannot be found or read. ConfigError: it cannot be run as the target
            is, or has another vocabulary without ``use_heterogeneous_vocab``.
    """

    def __init__(self, config: SpeculativeConfig, target: TargetModel):
        assert config.model is not None, "SpeculativeConfig requires it for this method"
        self._config, self._target = config, target
        source = open_source(hub.resolve(config.model))
        self._model_config = source.config()
        tokenizer = source.tokenizer()
        self._model_config.check_tokenizer(tokenizer.vocab_size, source.path)
        self._translation = None
        if config.use_heterogeneous_vocab:
            self._translation = Translation.between(target.tokenizer, tokenizer)
        else:
            check_same_vocabulary(target.tokenizer, tokenizer, config.model)
        # It shares the target's thread pool: a second pool would spin beside it while it waits.
        pool = target.rank.pool
        spec = replace(target.spec, path=source.path, pool=pool, group=None, pipeline=None)
        self._rank = source.load_rank(spec)

    @property
    def kv_bytes_per_token(self) -> int:
        return self._rank.capacity.kv_bytes_per_token

    def start(self, limits: RankLimits) -> AutoregressiveProposer:
        self._rank.start(limits)
        config = self._config
        sizes = self._model_config.vocab_size, self._target.model_config.vocab_size
        translation = self._translation
        return AutoregressiveProposer(
            self._rank.run,
            DraftKV(limits.num_blocks, self._target.spec.block_size),
            AutoregressiveLimits(
                max_tokens=config.num_speculative_tokens or _NUM_TOKENS,
                min_probability=(
                    _MIN_PROBABILITY if config.min_probability is None else config.min_probability
                ),
                vocab_size=len(translation.to_draft) if translation else min(sizes),
                follows_masks=translation is None and sizes[0] <= sizes[1],
                max_position=self._model_config.max_position,
                max_step_tokens=limits.max_num_batched_tokens,
                translation=translation,
            ),
        )
