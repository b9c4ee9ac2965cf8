"""What a user says, and who is asked for drafts then."""

from __future__ import annotations

import pytest

from octavo import LLM, SamplingParams
from octavo.base.errors import ConfigError
from octavo.settings.engine import EngineArgs
from octavo.settings.speculation import SpeculativeConfig

PROMPT = [*b"to be or not to be, that is the question: to be or not"]
# Few tokens to choose from, so that what comes has been there before.
GREEDY = SamplingParams(
    temperature=0.0, max_tokens=40, ignore_eos=True, allowed_token_ids=(5, 6, 7)
)


def config_of(**settings) -> SpeculativeConfig | None:
    return EngineArgs("m", **settings).speculation()


def test_nothing_said_is_no_speculation():
    assert config_of() is None
    assert config_of(spec_method="off") is None
    assert config_of(speculative_config='{"method": "off"}') is None


def test_flags_say_what_the_object_says_and_win_over_it():
    said = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    assert config_of(speculative_config=said) == SpeculativeConfig(
        "ngram", num_speculative_tokens=3, prompt_lookup_max=4
    )
    config = config_of(speculative_config=said, spec_method="suffix", spec_tokens=9)
    assert (config.method, config.num_speculative_tokens) == ("suffix", 9)
    assert config_of(spec_acceptance="typical") == SpeculativeConfig(acceptance="typical")
    assert config_of(speculative_config="{}").method == "auto"


def test_what_took_the_place_of_rejection_is_said():
    said = "no acceptance 'rejection' any more: leave it out, for 'exact'"
    with pytest.raises(ConfigError, match=said):
        config_of(spec_acceptance="rejection")
    with pytest.raises(ConfigError, match=said):
        config_of(speculative_config={"method": "ngram", "rejection_sample_method": "rejection"})
    with pytest.raises(ConfigError, match="acceptance must be one of exact, typical: 'x'"):
        config_of(spec_acceptance="x")


def test_names_of_others_are_understood():
    assert config_of(speculative_config={"method": "eagle3", "model": "x"}).method == "eagle"
    assert config_of(spec_method="redrafter", spec_model="x").method == "recurrent"
    assert config_of(speculative_config={"model": "small"}).method == "draft_model"
    rates = config_of(speculative_config={"synthetic_acceptance_rates": [0.9, 0.5]})
    assert rates.synthetic_acceptance_rates == (0.9, 0.5)


@pytest.mark.parametrize(
    ("said", "names"),
    [
        ("nothing", "JSON"),
        ("[]", "object"),
        ({"methd": "auto"}, "methd"),
        ({"method": "magic"}, "method"),
        ({"method": "medusa"}, "model"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens"),
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_max"),
        ({"acceptance": "sloppy"}, "acceptance"),
        ({"synthetic_acceptance_rates": [1.5]}, "synthetic_acceptance_rates"),
        ({"synthetic_acceptance_rates": 0.5}, "synthetic_acceptance_rates"),
        ({"synthetic_acceptance_rates": []}, "synthetic_acceptance_rates"),
        ({"min_probability": "high"}, "min_probability"),
        ({"model": 7, "method": "draft_model"}, "model"),
        ({"use_heterogeneous_vocab": "yes"}, "use_heterogeneous_vocab"),
    ],
)
def test_what_is_wrong_is_named(said, names):
    with pytest.raises(ConfigError, match=names):
        config_of(speculative_config=said)


@pytest.mark.parametrize("method", ["auto", "ngram", "suffix"])
def test_those_who_look_at_text_find_what_repeats(tiny_model, method):
    llm = LLM(str(tiny_model), max_model_len=128, speculative_config={"method": method})
    assert llm.config.speculation.method == method
    plain = llm.generate(
        [{"prompt_token_ids": PROMPT}], GREEDY.with_changes(speculative={"enabled": False})
    )
    drafted = llm.generate([{"prompt_token_ids": PROMPT}], GREEDY)
    assert drafted[0].outputs == plain[0].outputs
    assert plain[0].metrics.drafts.num_drafts == 0 < drafted[0].metrics.drafts.num_drafts


def test_nothing_is_drafted_where_there_are_so_many_requests(tiny_model):
    config = {"method": "ngram", "disable_by_batch_size": 2}
    llm = LLM(str(tiny_model), max_model_len=128, speculative_config=config)
    prompts = [{"prompt_token_ids": PROMPT + [index]} for index in range(3)]
    together = llm.generate(prompts, GREEDY)
    assert sum(each.metrics.drafts.num_drafts for each in together) <= 1
    assert llm.generate(prompts[:1], GREEDY)[0].metrics.drafts.num_drafts > 0
