"""Engine settings, as a user gives them (`EngineArgs`) and as they are resolved (`EngineConfig`).

`EngineArgs` is the one owner of names, defaults and help texts: the CLI's flags, the keyword
arguments of `LLM` and of `AsyncLLM` are all made from its fields. `EngineConfig` has every "auto"
replaced and lists the choices that were made; it is never changed afterwards.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any

from octavo.base.errors import ConfigError
from octavo.base.options import check_least, check_number, option
from octavo.core.kv_tables import ONE_TABLE, Windows, longest_sequence, most_blocks
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import SchedulerConfig
from octavo.core.sink_window import DEFAULT_SINKS, SinkWindowRules
from octavo.core.state_slots import least_slots, slots_per_request
from octavo.links.ticket import parse_address
from octavo.lora.limits import MAX_RANK, LoraLimits, named_adapters
from octavo.lora.request import LoRARequest
from octavo.models.kv_groups import KVGroups
from octavo.models.pooling import METHODS, Pooling
from octavo.runtime.capacity import Capacity, MachineShare
from octavo.runtime.layout import parse_ranks
from octavo.settings.kv_offload import HOST_CACHE_TOKENS, OffloadConfig, default_host_blocks
from octavo.settings.replica_range import ReplicaRange, parse_replicas
from octavo.settings.speculation import METHOD_CHOICES, SpeculativeConfig
from octavo.settings.vllm_compat import translated

GIB = 2**30
# Defaults. On a CPU, more rows at once are no faster, take more memory, and make others wait
# longer.
CPU_MAX_NUM_SEQS, CUDA_MAX_NUM_SEQS = 64, 256
POOLING_MAX_NUM_SEQS = 256
CPU_MAX_NUM_BATCHED_TOKENS, CUDA_MAX_NUM_BATCHED_TOKENS = 512, 2048
SERVING_ITL_TARGET_MS = 80.0
DEFAULT_KV_BUFFER = "1GiB"
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_bytes(text: str | int) -> int:
    """Return the number of bytes of ``"4GiB"``, ``"500MB"``, ``"2g"`` or a plain integer."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?|)b?\s*", text.lower())
    if match is None:
        raise ConfigError(f"{text!r} is no size in bytes: write 4GiB, 500MB or a plain number")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_folder(text: str) -> tuple[Path, int]:
    """Return the folder and the number of bytes of ``"DIR:SIZE"``."""
    folder, colon, size = text.rpartition(":")
    if not colon or not folder.strip():
        raise ConfigError(f"kv_offload {text!r} is not DIR:SIZE, a folder and a size: kv:4GiB")
    return Path(folder).expanduser(), parse_bytes(size)


@dataclass(frozen=True)
class EngineArgs:
    """The settings of an engine, named as vLLM names them. None and "auto" are chosen at load.

    Args:
        given: names of settings that the user gave, beside those that differ from their defaults.
            It matters where a model comes with settings of its own.

    Raises:
        ConfigError: a value is out of range, or asks for what this version cannot do.
    """

    model: str = option("smollm2-135m", "alias, folder, .gguf file or hub id")
    dtype: str = option(
        "auto",
        "type of activations; auto is float32 on CPU, bfloat16 on CUDA",
        ("auto", "float32", "bfloat16", "float16"),
    )
    device: str = option(
        "auto",
        "where to run: auto (a GPU where there is one), cpu, cuda, or cuda:N, one of several GPUs "
        "by its number",
    )
    kernels: str = option(
        "auto",
        "native CPU kernels, the fused ones of a GPU, or the reference ops in plain PyTorch; auto "
        "is native on CPU and fused on CUDA, where it can be; fused on CPU is the slow twin of the "
        "GPU's path, for tests",
        ("auto", "native", "fused", "reference"),
    )
    model_impl: str = option(
        "auto",
        "whose implementation of the model runs: octavo's, or that of transformers, slower, which "
        "auto is for families that octavo has not, where transformers is installed",
        ("auto", "octavo", "transformers"),
    )
    runner: str = option(
        "auto",
        "generate text, or pool hidden states to embeddings and scores; auto is what the model's "
        "files say: pooling for encoders, for classes without a head or with one of labels, and "
        "for folders of sentence-transformers",
        ("auto", "generate", "pooling"),
    )
    pooling: str | None = option(
        None,
        "how the hidden states of a text become one vector, with runner pooling: cls is the first "
        "token's, last the last one's; default: as the model's files say",
        METHODS,
    )
    quantization: str | None = option(None, "format of the weights; detected where not given")
    kv_cache_dtype: str = option(
        "auto",
        "type of the KV cache; auto is bf16 with native kernels (f32 with activations "
        "int16), else that of dtype; int8, fp8 and int4 have scales for each token and head, k8v4 "
        "is keys of int8 with values of int4",
        ("auto", "f32", "bf16", "int8", "fp8", "int4", "k8v4"),
    )
    activations: str = option(
        "auto",
        "what native kernels round activations to for quantized weights: 8 bits (int8), 15 "
        "(int16), or 15 where 8 would lose most (mixed, which auto is); on a GPU, in products of "
        "32 rows or more with weights of 8 bits and a scale a row: auto is 8 bits where the "
        "checkpoint was made for that, int8 is 8 bits anyway, int16 rounds none",
        ("auto", "int8", "mixed", "int16"),
    )
    max_model_len: int | str | None = option(
        None,
        "prompt and output tokens of one request; default: the model's, if the usual memory "
        "allows; auto: the longest that fits in all that is free",
    )
    max_num_seqs: int | None = option(
        None, "requests that run at once; 64 on CPU, 256 on CUDA", least=1
    )
    max_num_batched_tokens: int | None = option(
        None, "tokens of one step; 512 on CPU, 2048 on CUDA", least=1
    )
    block_size: int = option(16, "tokens of a KV block", least=1)
    num_blocks: int | None = option(
        None,
        "blocks of the KV pool; default: what memory allows. Of each rank's, with "
        "enable_dp_attention",
        least=1,
    )
    kv_cache_memory: int | str | None = option(None, "memory of the KV pool, such as 4GiB")
    gpu_memory_utilization: float = option(
        0.9, "share of the GPU's memory for weights, activations and KV"
    )
    swap_space: float = option(
        0,
        "GiB of host memory for KV that is evicted from a GPU's; on a CPU both are the same memory",
    )
    kv_offload: str | None = option(
        None,
        "a folder for evicted KV, where it is found again after a restart too, and the most it "
        "may take: DIR:SIZE, such as kv:10GiB",
    )
    enable_prefix_caching: bool = option(True, "reuse the KV of common prefixes")
    shared_prefix_decode: bool = option(
        True,
        "native kernels read the KV of a common prefix once a step for all requests that have it; "
        "answers stay the same, to the bit",
    )
    enable_window_tables: bool = option(
        True, "layers with sliding windows have block tables of their own, and free what left them"
    )
    window: int | None = option(
        None,
        "requests see so many of their last tokens, and generate any number; with attention sinks, "
        "since without the first tokens models break down",
        least=1,
    )
    attention_sinks: int | None = option(
        None, "first tokens that requests see beside their window (default: 4)", least=0
    )
    context_shift: bool = option(
        False,
        "requests may outgrow max_model_len: whenever it is full, the older half of their tokens "
        "is dropped, as by llama.cpp",
    )
    n_keep: int | None = option(
        None, "first tokens that a context shift keeps (default: 0)", least=0
    )
    enable_chunked_prefill: bool = option(True, "spread long prompts over steps")
    itl_target_ms: float | None = option(
        None,
        "milliseconds between two tokens of an answer, for which prompts of others are cut into "
        "chunks that are small enough; 0: never; default: 80 in a server, 0 elsewhere",
    )
    batching: str = option(
        "continuous",
        "static starts a batch only when the last has ended, for comparison",
        ("continuous", "static"),
    )
    max_queued_requests: int | None = option(
        1024, "requests that may wait, counted by completion: n = 4 is four", least=1
    )
    max_queued_tokens: int | None = option(
        None,
        "tokens that may wait: of prompts, and of answers as long as they may become; default: "
        "8388608 in a server, else any number",
        least=1,
    )
    tensor_parallel_size: int | str = option(
        1,
        "ranks that share each layer, with cores or a GPU each; auto is one for each NUMA node on "
        "a CPU, and 1 on a GPU",
    )
    pipeline_parallel_size: int = option(
        1,
        "stages that have some of the layers each, one after the other: processes of CPUs, each "
        "with tensor_parallel_size ranks",
        least=1,
    )
    stage_command: tuple[str, ...] = option(
        (),
        "command that reaches python on another machine, such as 'ssh node-2 "
        "/opt/octavo/bin/python': a stage of the pipeline is run there, with all its ranks; once "
        "for each stage but the last one, in their order",
    )
    stage_address: str | None = option(
        None,
        "address of this machine that these stages connect to, HOST or HOST:PORT; default: "
        "loopback, which no other machine reaches",
    )
    start_timeout: float = option(
        120.0,
        "seconds for which a rank of tensor_parallel_size or pipeline_parallel_size may do nothing "
        "while the engine starts, before the start is given up; 0 is any time",
        least=0.0,
    )
    data_parallel_size: int | str = option(
        1,
        "replicas: whole copies of the engine, each with its part of this machine's cores and "
        "memory for KV, or a GPU of its own; LEAST..MOST, such as 1..8, has them come and go with "
        "the load; of octavo serve only",
    )
    distributed: str | None = option(
        None,
        "who places the replicas: ray, on the machines of a Ray cluster (octavo cluster); default: "
        "they are on this machine; of octavo serve only",
        ("ray",),
    )
    ray_address: str | None = option(
        None,
        "HOST:PORT of the Ray cluster; default: that of RAY_ADDRESS, or the one that octavo "
        "cluster has started on this machine",
    )
    prefill_replicas: int = option(
        0,
        "of the replicas, the first so many compute prompts, and the others answers, to which the "
        "KV of prompts is passed on; 0: each computes both",
        least=0,
    )
    kv_buffer_size: int | str | None = option(
        None,
        "memory for KV on its way: what each of the prefill_replicas keeps for others, and what "
        "each replica receives (default: 1GiB)",
    )
    enable_expert_parallel: bool = option(
        False,
        "each of the tensor_parallel_size ranks has whole experts of a model that has some, in "
        "place of some rows of every expert",
    )
    enable_dp_attention: bool = option(
        False,
        "each of the tensor_parallel_size ranks computes the attention of its own requests and "
        "keeps their KV alone, so that all of them hold as many times the tokens; of models with "
        "latent attention (MLA, such as DeepSeek)",
    )
    expert_placement: str | None = option(
        None,
        "a file of `octavo place-experts` that says which ranks have which experts, of "
        "enable_expert_parallel; default: equal numbers, in order",
    )
    save_expert_loads: str | None = option(
        None,
        "a file for the tokens that each expert of each layer gets, which is written at the end; "
        "`octavo place-experts` reads it",
    )
    speculative_config: str | Mapping[str, Any] | None = option(
        None,
        'how tokens are drafted, as JSON: {"method": "auto"}; answers stay the same, on a '
        "GPU to the bit with batch_invariant alone",
    )
    spec_method: str | None = option(
        None, "the method of speculative_config, for short", METHOD_CHOICES
    )
    spec_model: str | None = option(None, "its model: a draft, or a folder of trained heads")
    spec_tokens: int | None = option(None, "its num_speculative_tokens: drafted at once")
    spec_acceptance: str | None = option(
        None,
        "its acceptance: exact gives the very tokens of plain decoding (on a GPU, with "
        "batch_invariant), and typical is faster and changes what the model says",
    )
    enable_lora: bool | None = option(
        None,
        "adapters for requests (LoRA): on ends the start where device or kernels have none; "
        "default: where there are some, any request may have one",
    )
    lora: tuple[str, ...] = option(
        (), "adapters to have from the start, each NAME=PATH of a folder that PEFT has written"
    )
    max_loras: int = option(8, "adapters that requests of one step may have", least=1)
    max_lora_rank: int = option(MAX_RANK, "largest rank of an adapter", least=1)
    lora_memory: int | str = option(
        "1GiB", "memory for adapters: those that are not used go, and are read again when needed"
    )
    lora_dtype: str = option(
        "auto",
        "type of adapters in memory; auto is float32 where weights of the model are, else bfloat16",
        ("auto", "float32", "bfloat16"),
    )
    enforce_eager: bool = option(False, "never capture CUDA graphs; of GPUs only")
    async_scheduling: bool = option(
        True,
        "prepare a step while a GPU computes the one before it, whose tokens it takes where they "
        "are; other kernels have nothing to wait for",
    )
    batch_invariant: bool = option(
        False,
        "a request's tokens have the same bits whatever runs beside it, and on GPUs however many "
        "share each layer (1, 2, 4 or 8), which costs them speed; on a CPU, in float32, they "
        "always have",
    )
    threads: int | None = option(
        None, "CPU threads; default: all that this process may use", least=1
    )
    seed: int = option(0, "for requests that have no seed of their own")
    trust: str = option("none", "there is no remote code", ("none",))
    given: InitVar[Collection[str]] = ()

    def __post_init__(self, given: Collection[str]) -> None:
        fields = dataclasses.fields(self)
        changed = {each.name for each in fields if getattr(self, each.name) != each.default}
        object.__setattr__(self, "given", frozenset(changed.union(given)))
        for each in fields:
            choices = each.metadata["choices"]
            value = getattr(self, each.name)
            if choices and value not in choices and value != each.default:
                raise ConfigError(f"{each.name} must be one of {', '.join(choices)}: {value!r}")
        check_least(self)
        if self.max_model_len not in (None, "auto"):
            check_number("max_model_len", self.max_model_len, 2)
        parse_ranks(self.tensor_parallel_size)
        parse_replicas(self.data_parallel_size)
        if self.ray_address is not None and self.distributed != "ray":
            raise ConfigError("ray_address is of distributed ray, which is not asked for")
        if not (isinstance(self.device, str) and _DEVICE.fullmatch(self.device)):
            raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, not {self.device!r}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError("gpu_memory_utilization must be in (0, 1]")
        if self.itl_target_ms is not None and not 0.0 <= self.itl_target_ms < math.inf:
            raise ConfigError(f"itl_target_ms must be at least 0, not {self.itl_target_ms!r}")
        if self.kv_cache_memory is not None and self.num_blocks is not None:
            raise ConfigError("give num_blocks or kv_cache_memory, not both")
        if not 0.0 <= self.swap_space < math.inf:
            raise ConfigError(f"swap_space must be at least 0, not {self.swap_space!r}")
        if self.kv_offload is not None:
            parse_folder(self.kv_offload)
        self._check_loras()
        self._check_roles()
        self.speculation()  # raises if it is wrong
        self._check_sink_windows()
        self._check_stages()
        self._check_experts()
        self._check_dp_attention()

    @property
    def asked_model_len(self) -> int | None:
        """``max_model_len``, if it is a number."""
        return self.max_model_len if isinstance(self.max_model_len, int) else None

    def speculation(self) -> SpeculativeConfig | None:
        """Return the settings of speculative decoding; None where it is off."""
        said: Any = self.speculative_config
        if isinstance(said, str):
            said = SpeculativeConfig.read(said)
        shorter = {
            "method": self.spec_method,
            "model": self.spec_model,
            "num_speculative_tokens": self.spec_tokens,
            "acceptance": self.spec_acceptance,
        }
        shorter = {name: value for name, value in shorter.items() if value is not None}
        if said is None and not shorter:
            return None
        return SpeculativeConfig.of({**(said or {}), **shorter})

    def sink_windows(self, why_not: str = "") -> SinkWindowRules:
        """Return the rules of sink windows; ``why_not`` is the reason why the model cannot have
        any."""
        sinks = DEFAULT_SINKS if self.attention_sinks is None else self.attention_sinks
        return SinkWindowRules(
            sinks, self.window or 0, self.context_shift, self.n_keep or 0, why_not=why_not
        )

    def _check_sink_windows(self) -> None:
        for name, without in (
            ("attention_sinks", self.window is None),
            ("n_keep", not self.context_shift),
        ):
            if getattr(self, name) is not None and without:
                beside = "window" if name == "attention_sinks" else "context_shift"
                raise ConfigError(f"{name} is of a {beside}, and none is asked for")
        if self.window is None and not self.context_shift:
            return
        asked = "context_shift" if self.window is None else "window"
        for other, is_there in (
            ("context_shift", self.window is not None and self.context_shift),
            ("prompts that are not cut into chunks", not self.enable_chunked_prefill),
            ("speculation", self.speculation() is not None),
        ):
            if is_there:
                raise ConfigError(f"{asked} and {other} do not go together: leave out one of them")

    def _check_stages(self) -> None:
        """Raise ConfigError for stages on other machines that do not fit the other settings."""
        # From JSON, it is a list.
        commands = tuple(self.stage_command)
        object.__setattr__(self, "stage_command", commands)
        if not commands:
            if self.stage_address is not None:
                raise ConfigError(
                    "stage_address is where stages on other machines connect to, and "
                    "stage_command names none"
                )
            return
        parse_address(self.stage_address or "localhost")
        if self.pipeline_parallel_size != len(commands) + 1:
            raise ConfigError(
                f"stage_command names the machines of {len(commands)} stages, and the last one is "
                f"here: pipeline_parallel_size must be {len(commands) + 1}, not "
                f"{self.pipeline_parallel_size}"
            )
        if self.replicas.most > 1:
            raise ConfigError(
                f"data_parallel_size={self.data_parallel_size}: replicas would share the machines "
                "of stage_command; leave it at 1, and start a server for each"
            )
        if self.distributed is not None:
            raise ConfigError(
                f"distributed={self.distributed} places an engine on one machine, and "
                "stage_command names others for its stages: leave out one of them"
            )

    def _check_loras(self) -> None:
        object.__setattr__(self, "lora", tuple(self.lora))
        if self.named_adapters and self.enable_lora is False:
            raise ConfigError("lora names adapters, and enable_lora is off: leave it out, or on")
        if self.max_lora_rank > MAX_RANK:
            raise ConfigError(f"max_lora_rank is {MAX_RANK} at most, not {self.max_lora_rank}")
        self.lora_limits  # noqa: B018 - checks it

    @property
    def named_adapters(self) -> tuple[LoRARequest, ...]:
        """``lora``, read."""
        return named_adapters(self.lora)

    @property
    def lora_limits(self) -> LoraLimits:
        return LoraLimits(self.max_loras, self.max_lora_rank, parse_bytes(self.lora_memory))

    def _check_experts(self) -> None:
        if self.save_expert_loads is not None and self.replicas.most > 1:
            raise ConfigError(
                f"save_expert_loads: {self.replicas.most} replicas would write the same file; "
                "save those of one engine, with data_parallel_size=1"
            )
        if self.save_expert_loads is not None and self.pipeline_parallel_size > 1:
            raise ConfigError(
                "save_expert_loads: of a pipeline, the last stage's layers alone would be saved; "
                "save them with pipeline_parallel_size=1: a placement serves any number of stages"
            )
        if self.expert_placement is not None and not self.enable_expert_parallel:
            raise ConfigError(
                "expert_placement is of enable_expert_parallel, which is off: turn it on, or leave "
                "out the placement"
            )
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            raise ConfigError(
                "enable_expert_parallel: the ranks that share the experts are those of "
                "tensor_parallel_size, which is 1: raise it, or leave experts together"
            )

    def _check_dp_attention(self) -> None:
        """Raise ConfigError where attention cannot be divided by requests, whatever the model."""
        if not self.enable_dp_attention:
            return
        speculation = self.speculation()
        for cannot_be, why in (
            (
                self.tensor_parallel_size == 1,
                "the ranks that have requests of their own are those of tensor_parallel_size, "
                "which is 1: raise it, or leave this off",
            ),
            (
                self.pipeline_parallel_size > 1,
                f"not with pipeline_parallel_size={self.pipeline_parallel_size}: stages of such "
                "ranks are not there; leave it at 1",
            ),
            (
                bool(self.swap_space or self.kv_offload or self.prefill_replicas),
                "evicted KV of one rank's pool is not kept for the others: leave out swap_space, "
                "kv_offload and prefill_replicas",
            ),
            (
                speculation is not None and speculation.method == "early_exit",
                "the first layers cannot draft by themselves for requests of several ranks: choose "
                "another method of speculation than early_exit",
            ),
        ):
            if cannot_be:
                raise ConfigError(f"enable_dp_attention: {why}")

    def _check_roles(self) -> None:
        """Raise ConfigError if prompts and answers cannot be computed apart."""
        if not self.prefill_replicas:
            if self.kv_buffer_size is not None:
                raise ConfigError("kv_buffer_size means nothing without prefill_replicas")
            return
        asked = f"prefill_replicas={self.prefill_replicas}"
        if self.replicas.is_elastic:
            raise ConfigError(
                f"{asked}: replicas with roles do not come and go: give one number as "
                "data_parallel_size"
            )
        if not self.enable_prefix_caching:
            raise ConfigError(f"{asked}: KV is found by its prefix: leave enable_prefix_caching on")
        if self.kv_offload is not None:
            raise ConfigError(f"{asked} and kv_offload do not go together: leave out one of them")
        self.kv_buffer_bytes  # noqa: B018 - checks it

    @property
    def kv_buffer_bytes(self) -> int:
        """``kv_buffer_size`` in bytes, or its default."""
        return parse_bytes(
            DEFAULT_KV_BUFFER if self.kv_buffer_size is None else self.kv_buffer_size
        )

    @property
    def replicas(self) -> ReplicaRange:
        """``data_parallel_size``, read."""
        return parse_replicas(self.data_parallel_size)

    @property
    def has_replicas(self) -> bool:
        """True if a server has its engines behind a router, be it one of them or many."""
        return self.replicas.most > 1 or self.distributed is not None

    def check_server(self) -> None:
        """Raise ConfigError if a server with these settings would have no replica for answers. An
        engine that one has placed knows those alone that share its machine."""
        if self.prefill_replicas >= self.replicas.least:
            raise ConfigError(
                f"prefill_replicas={self.prefill_replicas} of data_parallel_size="
                f"{self.data_parallel_size} replicas leaves none for answers: set "
                f"data_parallel_size to {self.prefill_replicas + 1} or more"
            )

    def for_pooling(self, pooling: Pooling, *, bidirectional: bool) -> EngineArgs:
        """Return the settings of an engine that pools.

        ``bidirectional``: tokens see those after them, so that a text is computed in one step.
        ConfigError if others are asked for that are of generation alone.
        """
        for name, is_asked in (
            ("speculative_config", self.speculation() is not None),
            ("window", self.window is not None),
            ("context_shift", self.context_shift),
            ("kv_offload", self.kv_offload is not None),
            ("swap_space", self.swap_space > 0),
            ("prefill_replicas", self.prefill_replicas > 0),
            ("tensor_parallel_size", self.tensor_parallel_size != 1),
            ("pipeline_parallel_size", self.pipeline_parallel_size != 1),
        ):
            if is_asked:
                raise ConfigError(f"{name} is of models that generate, and this one pools")
        length = self.max_model_len
        if length is None and pooling.max_length is not None:
            length = pooling.max_length
        return dataclasses.replace(
            self,
            max_model_len=length,
            max_num_seqs=self.max_num_seqs or POOLING_MAX_NUM_SEQS,
            enable_chunked_prefill=self.enable_chunked_prefill and not bidirectional,
            enable_prefix_caching=self.enable_prefix_caching
            and not bidirectional
            and pooling.sees_last_alone,
            itl_target_ms=0.0,
            given=vars(self)["given"],
        )

    def refuse_replicas(self) -> None:
        """Raise ConfigError if several replicas are asked for, where there is one engine."""
        if self.prefill_replicas:
            raise ConfigError(
                f"prefill_replicas={self.prefill_replicas}: only a server has replicas for prompts "
                "and others for answers; leave it out here"
            )
        if self.replicas.most > 1:
            raise ConfigError(
                f"data_parallel_size={self.data_parallel_size}: only a server has several replicas:"
                f" octavo serve {self.model} --data-parallel-size {self.data_parallel_size}; leave "
                "it at 1 here"
            )
        if self.distributed is not None:
            raise ConfigError(
                f"distributed={self.distributed}: only a server has its engines placed by others: "
                f"octavo serve {self.model} --distributed {self.distributed}; leave it out here"
            )

    def serving(self) -> EngineArgs:
        """Return the settings with the defaults of an engine whose answers are read while they
        are made."""
        if self.itl_target_ms is not None:
            return self
        return dataclasses.replace(self, itl_target_ms=SERVING_ITL_TARGET_MS)

    @classmethod
    def from_kwargs(cls, model: str | None = None, **kwargs: Any) -> EngineArgs:
        """Return the settings of keyword arguments, octavo's and vLLM's (``vllm_compat.py``)."""
        settings: dict[str, Any] = {} if model is None else {"model": model}
        settings |= translated(
            kwargs, {each.name: each.default for each in dataclasses.fields(cls)}
        )
        return cls(**settings, given=settings.keys())

    def given_settings(self) -> dict[str, Any]:
        """Return the settings that the user gave, except the model."""
        names: frozenset[str] = vars(self)["given"]
        return {name: getattr(self, name) for name in sorted(names - {"model"})}


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV pool.

    ``num_blocks``: of all pools together; ``num_pools``: of ranks with requests of their own.
    ``groups``: groups of layers that have block tables of their own; None: one table for all.
    ``offload``: the store of evicted blocks. ``num_state_slots``: of a model with recurrent layers
    (``core/state_slots.py``).
    """

    block_size: int
    num_blocks: int
    dtype: str
    enable_prefix_caching: bool
    groups: KVGroups | None = None
    offload: OffloadConfig | None = None
    num_state_slots: int = 0
    num_pools: int = 1

    @property
    def blocks_of_pool(self) -> int:
        return self.num_blocks // self.num_pools

    @property
    def windows(self) -> Windows:
        """The positions that the layers of each group attend to."""
        return ONE_TABLE if self.groups is None else self.groups.windows


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Resolved settings. ``choices`` has a line for each "auto": what it became, and why."""

    model: str
    device: str
    dtype: str
    seed: int
    batching: str
    cache: CacheConfig
    scheduler: SchedulerConfig
    choices: tuple[str, ...] = ()
    speculation: SpeculativeConfig | None = None


def resolve(args: EngineArgs, capacity: Capacity) -> EngineConfig:
    """Replace every "auto" and check that the parts fit together.

    Raises:
        ConfigError: the KV pool cannot hold one request of ``max_model_len``; says by how much.
    """
    choices: list[str] = []
    max_num_seqs = default_num_seqs(args, capacity.device)
    wanted_len = args.asked_model_len or capacity.model_max_len
    if wanted_len > capacity.model_max_len:
        raise ConfigError(
            f"max_model_len {wanted_len} exceeds the {capacity.model_max_len} positions of the "
            "model: lower it"
        )

    step_tokens = wanted_len
    if args.enable_chunked_prefill:
        step_tokens = default_step_tokens(args, capacity.device, wanted_len)
    groups = _groups(args, capacity, wanted_len)
    windows = ONE_TABLE if groups is None else groups.windows
    slot_bytes = capacity.kv_bytes_per_token
    if groups is not None:
        slot_bytes = groups.bytes_of_slot(slot_bytes)
    block_bytes = args.block_size * slot_bytes
    num_state_slots = _state_slots(capacity, max_num_seqs)
    state_bytes = num_state_slots * capacity.state_bytes
    if num_state_slots:
        choices.append(
            f"states: {num_state_slots} slots, {state_bytes / GIB:.2f} GiB: two for each request "
            "that runs, the others for snapshots of prefixes"
        )
    blocks_per_seq = most_blocks(windows, wanted_len, args.block_size, step_tokens)
    sink_windows = args.sink_windows(capacity.no_sinks)
    sink_windows.check(wanted_len)
    if (sink_window := sink_windows.of(SamplingParams(), wanted_len)) is not None:
        blocks_per_seq = max(blocks_per_seq, sink_window.most_blocks(args.block_size, step_tokens))
    limited_by = ""
    if args.num_blocks is not None:
        num_blocks = args.num_blocks
    elif args.kv_cache_memory is not None:
        num_blocks = parse_bytes(args.kv_cache_memory) // block_bytes
        if num_blocks < 1:
            raise ConfigError(
                f"kv_cache_memory must hold at least one block of {block_bytes:,} bytes"
            )
    else:
        if capacity.ledger is not None:
            capacity.ledger.check_first_block(block_bytes)
        # More blocks could never be used at once.
        num_blocks = blocks_per_seq * max_num_seqs
        if capacity.kv_of_one_step:
            in_step = default_step_tokens(args, capacity.device, wanted_len) // args.block_size
            num_blocks = min(num_blocks, in_step + max_num_seqs + 1)
        # As much as one request needs, if it is there.
        least = blocks_per_seq if args.max_model_len == "auto" else 0
        for share in capacity.shares:
            share_bytes = args.block_size * share.bytes_of_slot(groups)
            fit = _blocks_of(share, share_bytes, least, num_state_slots)
            if fit < num_blocks:
                num_blocks, limited_by = fit, _has_no_more_room(share)
        num_blocks = max(1, num_blocks)
        pools = "KV pool" if capacity.num_pools == 1 else f"each of {capacity.num_pools} KV pools"
        choices.append(
            f"{pools}: {num_blocks} blocks of {args.block_size} tokens{_of_layers(groups)}, "
            f"{num_blocks * block_bytes / GIB:.2f} GiB" + limited_by
        )

    pool_tokens = longest_sequence(windows, num_blocks, args.block_size, step_tokens, wanted_len)
    max_model_len = wanted_len
    if pool_tokens < wanted_len:
        if args.asked_model_len is not None:
            raise ConfigError(
                f"max_model_len {wanted_len} needs {blocks_per_seq} blocks "
                f"({blocks_per_seq * block_bytes / GIB:.2f} GiB of KV), and the pool has "
                f"{num_blocks}{limited_by}: raise kv_cache_memory or num_blocks, or lower "
                f"max_model_len to {pool_tokens}"
            )
        max_model_len = pool_tokens
        choices.append(
            f"max_model_len: {pool_tokens} of the model's {wanted_len}, as the KV pool allows"
        )
    elif args.max_model_len == "auto":
        choices.append(f"max_model_len: {wanted_len}, all that the model has")
    if capacity.ledger is not None:
        choices += capacity.ledger.described(num_blocks * block_bytes)
    offload = _offload(args, capacity, windows, block_bytes * capacity.num_parts)
    if offload is not None:
        choices.append(_described(offload, capacity.device))
    num_places = 0 if offload is None else offload.num_places
    for share in capacity.machines:
        block = args.block_size * share.bytes_of_slot(groups)
        needed = (num_blocks + num_places) * block + num_state_slots * share.state_bytes
        choices.append(
            f"{share.name} has {share.free_bytes / GIB:.2f} GiB of free memory beside its weights, "
            f"of which KV takes {needed / GIB:.2f}"
        )
        if needed > share.free_bytes:
            raise ConfigError(
                f"{share.name} has {share.free_bytes / GIB:.2f} GiB of free memory, and KV of its "
                f"layers takes {needed / GIB:.2f} in {num_blocks} blocks: lower num_blocks, "
                "kv_cache_memory or swap_space, or give it fewer layers, by more stages"
            )
    return EngineConfig(
        model=args.model,
        device=capacity.device,
        dtype=capacity.dtype,
        seed=args.seed,
        batching=args.batching,
        cache=CacheConfig(
            args.block_size,
            num_blocks * capacity.num_pools,
            capacity.kv_dtype,
            args.enable_prefix_caching,
            groups,
            offload,
            num_state_slots,
            capacity.num_pools,
        ),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=default_step_tokens(args, capacity.device, max_model_len),
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            enable_chunked_prefill=args.enable_chunked_prefill,
            max_queued_requests=args.max_queued_requests,
            max_queued_tokens=args.max_queued_tokens,
            target_step_seconds=(args.itl_target_ms or 0.0) / 1e3,
            max_multi_steps=capacity.max_multi_steps,
            sink_windows=sink_windows,
        ),
        choices=tuple(choices),
        speculation=args.speculation(),
    )


def default_num_seqs(args: EngineArgs, device: str) -> int:
    """Return the number of requests that run at once, by the settings or by default."""
    return args.max_num_seqs or (CUDA_MAX_NUM_SEQS if is_gpu(device) else CPU_MAX_NUM_SEQS)


def default_step_tokens(args: EngineArgs, device: str, max_model_len: int) -> int:
    """Return the tokens of a step, by the settings or by default: at least a whole prompt's, if
    prompts are not cut into chunks."""
    if args.max_num_batched_tokens is not None:
        return args.max_num_batched_tokens
    usual = CUDA_MAX_NUM_BATCHED_TOKENS if is_gpu(device) else CPU_MAX_NUM_BATCHED_TOKENS
    return usual if args.enable_chunked_prefill else max(usual, max_model_len)


def is_gpu(device: str) -> bool:
    """Return whether a device's name, such as ``cuda:1``, is that of a GPU."""
    return device.startswith("cuda")


def _blocks_of(share: MachineShare, block_bytes: int, least: int, num_state_slots: int) -> int:
    """Return the blocks that a machine has room for by default: ``least`` if its memory has them at
    all."""
    if not block_bytes:
        return sys.maxsize
    memory = max(share.kv_memory_bytes, min(least * block_bytes, share.kv_memory_most))
    return (memory - num_state_slots * share.state_bytes) // block_bytes


def _has_no_more_room(share: MachineShare) -> str:
    return f"; {share.name} has room for no more" if share.name else ""


def _state_slots(capacity: Capacity, max_num_seqs: int) -> int:
    """Return the slots for states of recurrent layers: two for each running request, and as many
    again for snapshots, if that takes no more than half of the memory for KV."""
    if not capacity.state_bytes:
        return 0
    fit = min(
        share.kv_memory_bytes // 2 // share.state_bytes
        for share in capacity.shares
        if share.state_bytes
    )
    return max(least_slots(depth=1), min(2 * slots_per_request(depth=1) * max_num_seqs, fit))


def _groups(args: EngineArgs, capacity: Capacity, max_model_len: int) -> KVGroups | None:
    """Return the groups of layers that get block tables of their own. None where one table
    serves all: tables of their own would free nothing, or the drafter knows of one only."""
    speculation = args.speculation()
    groups = capacity.kv_groups
    if groups is None or not args.enable_window_tables:
        return None
    if speculation is not None and speculation.shares_blocks:
        return None
    is_outgrown = any(window is not None and window < max_model_len for window in groups.windows)
    return groups if is_outgrown else None


def _offload(
    args: EngineArgs, capacity: Capacity, windows: Windows, block_bytes: int
) -> OffloadConfig | None:
    """Return the store of evicted blocks; None for none. ConfigError if they cannot be kept."""
    if args.kv_offload is None and not args.swap_space and not args.prefill_replicas:
        return None
    name = "prefill_replicas" if args.prefill_replicas else "swap_space"
    name = name if args.kv_offload is None else "kv_offload"
    if not args.enable_prefix_caching:
        raise ConfigError(f"{name} is for the prefix cache: leave enable_prefix_caching on")
    if capacity.state_bytes:
        raise ConfigError(
            f"{name}: this model has recurrent layers, and blocks are of no use without the state "
            "that these had at their end: leave it out"
        )
    folder, max_bytes = (None, 0) if args.kv_offload is None else parse_folder(args.kv_offload)
    if folder is not None and max_bytes < block_bytes:
        raise ConfigError(f"kv_offload must have room for one block of {block_bytes:,} bytes")
    num_places = int(args.swap_space * GIB) // block_bytes
    if args.swap_space and num_places < 1:
        raise ConfigError(f"swap_space must hold at least one block of {block_bytes:,} bytes")
    if args.prefill_replicas:
        num_arriving = args.kv_buffer_bytes // block_bytes
        if num_arriving < 1:
            raise ConfigError(f"kv_buffer_size must hold a block of {block_bytes:,} bytes or more")
        num_places = max(num_places, num_arriving)
        return OffloadConfig(num_places, block_bytes, keeps_memory=True, is_transferred=True)
    num_useful = most_blocks(windows, HOST_CACHE_TOKENS, args.block_size, step_tokens=0)
    return OffloadConfig(
        num_places or default_host_blocks(num_useful, block_bytes),
        block_bytes,
        folder,
        max_bytes,
        keeps_memory=num_places > 0,
    )


def _described(offload: OffloadConfig, device: str) -> str:
    memory = f"{offload.num_places * offload.block_bytes / GIB:.2f} GiB of host memory"
    if offload.is_transferred:
        return f"KV from other replicas, and evicted KV: {memory}"
    if offload.folder is not None:
        return (
            f"evicted KV: up to {offload.max_bytes / GIB:.2f} GiB in {offload.folder}, "
            f"through {memory}"
        )
    if is_gpu(device):
        return f"evicted KV: {memory}"
    return (
        f"evicted KV: {memory}, which is memory like the pool's: on a CPU kv_cache_memory is worth "
        "more, and kv_offload keeps KV on a disk"
    )


def _of_layers(groups: KVGroups | None) -> str:
    """Return the words for a block that has only some of the layers."""
    if groups is None or groups.num_groups == 1:
        return ""
    return f" in {groups.layers_per_block} of {len(groups.places)} layers"
