"""Makes a Hugging Face folder in bfloat16 from a GGUF file.

vLLM and transformers want a folder; the model that octavo ships with is a GGUF file. Here its
weights are dequantized and rounded to bfloat16, by transformers, and its tokenizer is written as a
tokenizer.json. All engines that run in bfloat16, octavo too, then read the same folder. Needs the
packages of octavo's `test` extra (transformers, gguf, accelerate).
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from octavo.base.errors import BenchmarkError

SAMPLE = "Café – naïve 東京 🚲\n\tdef f(x):  return x ** 2  # 3,141.59\r\n<|im_start|>user"


def make_hf_model(gguf: Path, folder: Path) -> Path:
    """Write the model in ``gguf`` to ``folder``, which appears whole or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as staging:
        made = Path(staging) / folder.name
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        check_tokenizer(gguf, made)
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    return folder


def check_tokenizer(gguf: Path, folder: Path) -> None:
    """Raise BenchmarkError unless the same text gives the same tokens in both."""
    from octavo.models.gguf import GGUFFile
    from octavo.text.folder_tokenizer import load_folder_tokenizer
    from octavo.text.gguf_tokenizer import load_gguf_tokenizer

    with GGUFFile(gguf) as file:
        ours = load_gguf_tokenizer(file.metadata, gguf).encode(SAMPLE)
    theirs = load_folder_tokenizer(folder).encode(SAMPLE)
    if ours != theirs:
        raise BenchmarkError(f"the tokenizer of {gguf} did not survive: {ours} became {theirs}")


def main() -> None:
    from octavo import hub

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a .gguf file, or an alias such as smollm2-135m")
    parser.add_argument("folder", type=Path, help="where to write it; replaced if it is there")
    args = parser.parse_args()
    print(make_hf_model(hub.resolve(args.model), args.folder))


if __name__ == "__main__":
    main()
