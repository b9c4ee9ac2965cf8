"""Names of architectures."""

from __future__ import annotations

import subprocess
import sys

import pytest

from octavo.errors import UnsupportedModelError
from octavo.models import registry


def test_every_name_leads_to_a_class():
    for architecture in registry.ARCHITECTURES:
        model = registry.model_class(architecture)
        assert callable(model.hf_name) and callable(model.gguf_name)
        assert registry.resolve_architecture(architecture, "here") == architecture
    for target in (*registry.ALIASES.values(), *registry.GGUF_ARCHITECTURES.values()):
        assert target in registry.ARCHITECTURES


def test_unknown_names_list_the_known():
    with pytest.raises(UnsupportedModelError, match="^here: .*LlamaForCausalLM.*not Nope"):
        registry.resolve_architecture("Nope", "here")
    with pytest.raises(UnsupportedModelError, match="^here: .*gemma3.*not nope"):
        registry.resolve_gguf_architecture("nope", "here")


def test_looking_a_name_up_imports_no_torch():
    code = (
        "import sys; import octavo.models.config, octavo.models.registry;"
        "import octavo.models.config_hf, octavo.models.config_gguf;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
