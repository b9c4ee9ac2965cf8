from __future__ import annotations

import json
import tomllib

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from octavo.base.errors import ConfigError
from octavo.tuning.config_text import check_name, config_text

NAMES = ["model", "max_num_seqs", "itl_target_ms", "enable_chunked_prefill"]
values = st.one_of(
    st.booleans(),
    st.integers(0, 10**9),
    st.integers(0, 10**6).map(lambda number: number / 8),
    st.text(st.characters(codec="ascii", exclude_characters="\x7f")),
)


@given(st.dictionaries(st.sampled_from(NAMES), values))
def test_what_is_written_is_read_again(settings):
    assert tomllib.loads(config_text("a.toml", settings, ["note"])) == settings
    read = yaml.safe_load(config_text("a.yaml", settings, ["note"])) or {}
    assert read == settings


def test_notes_come_first_and_are_no_settings():
    text = config_text("a.yml", {"model": "m"}, ["a = 1\nb: 2", "word " * 60])
    *notes, last = text.splitlines()
    assert last == 'model: "m"' and len(notes) > 3
    assert all(note.startswith("# ") and len(note) <= 100 for note in notes)


def test_a_setting_has_its_reason_before_it():
    said = config_text("a.yaml", {"model": "m", "seed": 1}, ["note"], {"seed": "because"})
    assert said.splitlines() == ["# note", "", 'model: "m"', "", "# because", "seed: 1"]


@pytest.mark.parametrize("name", ["a.json", "a", "a.yaml.txt"])
def test_other_formats_are_refused(name):
    with pytest.raises(ConfigError, match="is written as .yaml or .toml"):
        check_name(name)


def test_json_texts_stay_texts():
    said = json.dumps({"method": "ngram"})
    text = config_text("a.yaml", {"speculative_config": said}, [])
    assert yaml.safe_load(text) == {"speculative_config": said}
