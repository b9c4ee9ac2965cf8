"""Tiny models of transformers with random weights whose hidden states are pooled.

They are encoders, decoders without a head, and classes with a head of labels.
"""

from __future__ import annotations

import json

import torch
from tiny_transformers import SIZES, transformers

VOCAB = 260
_SIZES = {**SIZES, "vocab_size": VOCAB, "pad_token_id": 0}
_BERT = {key: value for key, value in _SIZES.items() if key != "num_key_value_heads"}
_ODD = {"hidden_size": 60, "num_attention_heads": 5, "intermediate_size": 88}

# name: (class, config class, what differs)
ENCODERS = {
    "bert": ("BertModel", "BertConfig", {}),
    "bert-odd": ("BertModel", "BertConfig", {**_ODD, "hidden_act": "gelu_new"}),
    "bert-relu": ("BertModel", "BertConfig", {"hidden_act": "relu", "type_vocab_size": 3}),
    "roberta": ("RobertaModel", "RobertaConfig", {"pad_token_id": 1, "type_vocab_size": 1}),
    "xlm-roberta": ("XLMRobertaModel", "XLMRobertaConfig", {"pad_token_id": 1}),
    "modernbert": ("ModernBertModel", "ModernBertConfig", {"local_attention": 12}),
    "modernbert-odd": (
        "ModernBertModel",
        "ModernBertConfig",
        {
            **_ODD,
            "local_attention": 40,
            "norm_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "num_hidden_layers": 4,
        },
    ),
    "embedding-gemma": (
        "Gemma3TextModel",
        "Gemma3TextConfig",
        {
            "use_bidirectional_attention": True,
            "sliding_window": 16,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3-body": (
        "Qwen3Model",
        "Qwen3Config",
        {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False},
    ),
    "llama-body": ("LlamaModel", "LlamaConfig", {"num_key_value_heads": 2}),
}
_ONE, _THREE = {"num_labels": 1}, {"id2label": {0: "bad", 1: "so so", 2: "good"}}
CLASSIFIERS = {
    "bert-one": ("BertForSequenceClassification", "BertConfig", _ONE),
    "bert-three": ("BertForSequenceClassification", "BertConfig", _THREE),
    "roberta-one": (
        "RobertaForSequenceClassification",
        "RobertaConfig",
        {**_ONE, "pad_token_id": 1},
    ),
    "xlm-roberta-one": (
        "XLMRobertaForSequenceClassification",
        "XLMRobertaConfig",
        {**_ONE, "pad_token_id": 1},
    ),
    "modernbert-one": (
        "ModernBertForSequenceClassification",
        "ModernBertConfig",
        {**_ONE, "local_attention": 12},
    ),
    "modernbert-mean": (
        "ModernBertForSequenceClassification",
        "ModernBertConfig",
        {**_THREE, "local_attention": 12, "classifier_pooling": "mean", "classifier_bias": True},
    ),
    "qwen2-one": (
        "Qwen2ForSequenceClassification",
        "Qwen2Config",
        {**_ONE, "num_key_value_heads": 2, "tie_word_embeddings": False},
    ),
}
CASES = {**ENCODERS, **CLASSIFIERS}


def make_encoder(name, folder, **more):
    """Write a model and its tokenizer; return the model of transformers."""
    torch.manual_seed(sum(map(ord, name)))
    kind, config_kind, changes = CASES[name]
    config = getattr(transformers, config_kind)(**{**_BERT, **changes, **more})
    config._attn_implementation = "eager"
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5.0 if "bert" in name.lower() else 3.0)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    write_pair_tokenizer(folder)
    return model


def write_pair_tokenizer(folder):
    """Write a tokenizer in which a token is a byte, with tokens around texts and pairs."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in ("<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B:1 </s>:1",
        special_tokens=[("<s>", 256), ("</s>", 257)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"cls_token": "<s>", "sep_token": "</s>", "model_max_length": 128}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


def write_modules(folder, *modules, prompts=None, default=None, max_length=None):
    """Write the files of sentence-transformers: modules as (class, its config), in their order."""
    entries = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
    ]
    for number, (kind, config) in enumerate(modules, 1):
        path = f"{number}_{kind}"
        (folder / path).mkdir(exist_ok=True)
        if config is not None:
            (folder / path / "config.json").write_text(json.dumps(config))
        entries.append(
            {"idx": number, "name": str(number), "path": path, "type": f"a.module.{kind}"}
        )
    (folder / "modules.json").write_text(json.dumps(entries))
    if prompts is not None:
        config = {"prompts": prompts, "default_prompt_name": default}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(config))
    if max_length is not None:
        (folder / "sentence_bert_config.json").write_text(
            json.dumps({"max_seq_length": max_length, "do_lower_case": False})
        )
