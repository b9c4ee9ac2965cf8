"""Names of architectures."""

from __future__ import annotations

import subprocess
import sys

import pytest

from octavo.base.errors import UnsupportedModelError
from octavo.models import registry

RUNNING = [listed for listed in registry.FAMILIES if listed.family]


@pytest.mark.parametrize("listed", RUNNING, ids=lambda listed: listed.family)
def test_a_line_of_the_registry_is_what_its_family_says(listed):
    for name in listed.names:
        family = registry.find_family(name, "here")
        assert family.architecture == listed.names[0]
    if listed.gguf is not None:
        assert registry.find_gguf_family(listed.gguf, "here") is family
        assert family.gguf == listed.gguf


def test_a_kind_of_gguf_file_is_read_by_one_family():
    kinds = [listed.gguf for listed in registry.FAMILIES if listed.gguf]
    assert len(set(kinds)) == len(kinds)
    for architecture in registry.ARCHITECTURES:
        assert registry.family_of(architecture).gguf in (None, *kinds)


def test_unknown_names_list_the_known():
    with pytest.raises(UnsupportedModelError, match="^here: .*LlamaForCausalLM.*not Nope"):
        registry.find_family("Nope", "here")
    with pytest.raises(UnsupportedModelError, match="^here: .*gemma3.*not nope"):
        registry.find_gguf_family("nope", "here")


def test_looking_a_name_up_imports_no_torch():
    code = (
        "import sys; import octavo.models.config, octavo.models.registry;"
        "import octavo.models.config_hf, octavo.models.config_gguf;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
