"""Differences of llama.cpp: config values that it takes for fixed where octavo reads the file.

Files say all that octavo's models have, or are not written (``config_to_gguf``). llama.cpp reads
each architecture by code of its own (``src/models``), which takes some of it for settled.
"""

from __future__ import annotations

from octavo.models.config import ModelConfig
from octavo.models.registry import family_of, gguf_architecture
from octavo.models.sliding_windows import window_size

# Architectures of files whose sliding windows llama.cpp applies.
_WITH_WINDOWS = ("cohere2", "gemma2", "gemma3", "gpt-oss", "olmo2")
_WITHOUT_OUTPUT_BIAS = ("gemma3", "qwen2", "qwen2moe", "qwen3", "qwen3moe")
_SQUARE_ATTENTION = ("olmo2", "olmoe", "phi3", "starcoder2")


def unlike_in_llama_cpp(config: ModelConfig) -> list[str]:
    """The known differences in how llama.cpp runs a file of this model."""
    kind = gguf_architecture(config)
    entries = family_of(config.architecture).to_gguf(config)
    checks = {
        "it ignores the sliding window, and attends to all tokens": window_size(config) is not None
        and kind not in _WITH_WINDOWS,
        "it scales scores by the size of heads": kind == "gemma3" and "attention.scale" in entries,
        "it has caps of 50 and 30 for scores and logits": kind == "gemma2"
        and None in (config.attention_softcap, config.logit_softcap),
        "it refuses files with a bias behind attention": kind in _WITHOUT_OUTPUT_BIAS
        and config.attention_output_bias,
        "it refuses files without biases": kind == "starcoder2" and not config.mlp_bias,
        "it refuses heads that together are not as wide as the model": kind in _SQUARE_ATTENTION
        and config.num_heads * config.head_dim != config.hidden_size,
        "it refuses fewer heads of keys than of queries": kind == "olmoe"
        and config.num_kv_heads != config.num_heads,
    }
    return [what for what, applies in checks.items() if applies]
