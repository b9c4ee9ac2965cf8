"""Octavo: open-weight language models, fast and cheap on the machine you have.

    from octavo import LLM, SamplingParams

    llm = LLM("smollm2-135m")
    print(llm.generate("The capital of France is", SamplingParams(max_tokens=8))[0].outputs[0].text)

Importing this package is cheap: a name below brings in what it needs when it is first used.
"""

from __future__ import annotations

from typing import Any

from octavo.base import renamed
from octavo.base.lazy_exports import homes_of, named

__version__ = "0.1.0"

_HOMES = homes_of(__file__)

__all__ = ["__version__", *sorted(_HOMES)]


renamed.install()


def __getattr__(name: str) -> Any:
    return named(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted(__all__)
