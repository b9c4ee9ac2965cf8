"""Efficiency of an engine on a device: the shares of its ceilings that it reaches, and overheads.

Defaults by engine and device. Where a share was derived from measurements, the comment names them;
others are what is usual, with a wider spread. Measurements of one's own take their place
(`octavo.cost.measured_steps.MeasuredSteps`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.base.errors import ConfigError
from octavo.cost.communication import Link, link_between
from octavo.cost.hardware import Device
from octavo.cost.parallel import Parallel
from octavo.cost.prediction import Source

PROFILES = ("octavo", "vllm", "llama.cpp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of a device's ceilings that are reached, and the fixed costs of a step.

    Args:
        memory: share of the bandwidth that reading weights reaches, and keys and values.
        compute: share of the peak that large matrix products reach.
        attention_compute: the same of attention.
        dequantized: what is left of it where weights have fewer bits than they are computed in.
        sharpness: how well memory and arithmetic overlap where they take about as long: the times
            a and b together take (a^p + b^p)^(1/p). Infinity is the longer one, 1 their sum.
        launch_s: of one operation of one layer, however small.
        step_s, sequence_s: of a step outside the model (scheduling, sampling, delivering), and for
            each of its sequences.
        link: between devices; None where there is but one.
        spread: by what share operations and communication may be off, in nine cases of ten.
        overhead_spread: the same of everything else: 1 is half to twice as much.
        source, overhead_source: how the one and the other is known.
    """

    memory: float
    compute: float
    attention_compute: float
    dequantized: float = 1.0
    sharpness: float = 5.0
    launch_s: float = 0.0
    step_s: float = 0.0
    sequence_s: float = 0.0
    link: Link | None = None
    spread: float = 0.0
    overhead_spread: float = 0.0
    source: Source = "roofline"
    overhead_source: Source = "roofline"


# What nothing can beat: every ceiling is reached, and nothing else takes time.
IDEAL = Efficiency(memory=1.0, compute=1.0, attention_compute=1.0, sharpness=float("inf"))


def efficiency_of(
    profile_name: str, device: Device, parallel: Parallel | None = None, *, eager: bool = False
) -> Efficiency:
    """The efficiency of an engine (one of ``PROFILES``) on a device. For CPUs, and GPUs that share
    their memory with one, all engines have the same figures, as too little is known of each.

    ``eager``: every kernel is launched by Python, without CUDA graphs (vLLM's ``enforce_eager``).

    ConfigError for an engine that is not known, and for several devices without a link.
    """
    if profile_name not in PROFILES:
        raise ConfigError(f"no engine profile {profile_name!r}: there are {', '.join(PROFILES)}")
    if device.kind == "cpu":
        found = _on_cpu(device)
    elif device.kind == "unified":
        found = _UNIFIED
    else:
        found = _on_gpu(profile_name, device, eager)
    if parallel is None or parallel.tp == parallel.pp == parallel.ep == 1:
        return found  # copies of a model have nothing to say to each other
    return replace(found, link=link_between(device, parallel))


# -- GPUs -----------------------------------------------------------------------------------------

# Shares of bandwidth and of peak that 16-bit products of one and of 4,096 rows reach, by how the
# device's name begins. From Vidur's profiles of Llama-2-70B's matrices (gate+up 0.580 and
# 16.04 ms, down 0.290 and 8.12 ms on A100; 0.311 and 5.71, 0.171 and 2.67 ms on H100), less a
# launch each; H200 as measured: a large copy 4.3 TB/s, bf16 products 769 to 798 TFLOPS. RTX 4090 by
# vLLM's steps of 41 streams (25.2 ms for 20.4 GB; LLMServingSim's trace), RTX 3090 by llama.cpp's
# tokens (156.6 a second of Llama 3 8B in Q4_0; #15802).
_GPU_SHARES = {
    "A100": (0.80, 0.76),
    "H100": (0.90, 0.75),
    "H200": (0.90, 0.79),
    "RTX 3090": (0.90, 0.70),
    "RTX 4090": (0.90, 0.70),
}
_OTHER_GPU = (0.80, 0.70)  # as the A40 of the same profiles: 0.74 to 0.83, and 0.73 to 0.81
_SPREAD, _OTHER_SPREAD, _LLAMA_CPP_SPREAD = 0.20, 0.30, 0.50

_GRAPHS = Efficiency(
    memory=_OTHER_GPU[0],
    compute=_OTHER_GPU[1],
    # FlashAttention-2 and -3 reach about 0.6 to 0.7 of the peak at long prompts, less at short.
    attention_compute=0.55,
    dequantized=0.8,  # weights of 4 bits in products of 16: 0.7 to 0.9
    launch_s=4e-6,  # what is left of a product of one row when its bytes are subtracted: 4 to 12 us
    step_s=0.6e-3,  # engines with CUDA graphs: 0.3 to 1 ms
    sequence_s=10e-6,
    overhead_spread=1.0,
)
# DistServe's engine without graphs takes 3 to 5 ms a step beyond the roofline; vLLM's up to 5.
_EAGER = replace(_GRAPHS, launch_s=10e-6, step_s=3e-3, sequence_s=20e-6)
# Its micro-batches have 512 rows: 8,381 tokens/s of Llama 7B in F16 on an A100 (llama.cpp #6017)
# are 0.35 of the peak, 10,359 of Llama 3 8B in Q4_0 on an RTX 4090 (#7676) and 3,491 in Q6_K on an
# RTX 3090 (#7860) 0.24 and 0.18 of that of int8.
_LLAMA_CPP = replace(_GRAPHS, step_s=0.3e-3, attention_compute=0.3, dequantized=0.6)
_MICRO_BATCH_SHARE = 0.5  # of what products of other engines reach
# octavo's decode steps are graphs too, and the host prepares one while another runs; but it
# has not been timed on a GPU, so that these are the shares of engines built like it.
_OCTAVO_SPREAD = 0.35


def _on_gpu(profile_name: str, device: Device, eager: bool) -> Efficiency:
    shares = next((of for name, of in _GPU_SHARES.items() if device.name.startswith(name)), None)
    memory, compute = shares or _OTHER_GPU
    base = _LLAMA_CPP if profile_name == "llama.cpp" else _EAGER if eager else _GRAPHS
    spread = _SPREAD if shares and device.trust == "sure" else _OTHER_SPREAD
    if profile_name == "octavo":
        spread = _OCTAVO_SPREAD
    if profile_name == "llama.cpp":
        compute, spread = compute * _MICRO_BATCH_SHARE, _LLAMA_CPP_SPREAD
    return replace(base, memory=memory, compute=compute, spread=spread)


# Metal, by llama.cpp's own table (discussion 4167: Llama 7B in F16 and Q4_0 on M2 Max, M2 Ultra, M3
# Max, M3 Ultra and M4 Max): prompts of 512 tokens and tokens one by one are within 13 %, but that
# Ultras take a fifth longer for a token.
_UNIFIED = replace(
    _LLAMA_CPP,
    memory=0.86,
    compute=0.70,
    dequantized=0.9,
    launch_s=10e-6,
    step_s=0.5e-3,
    spread=0.25,
    overhead_spread=1.0,
)


# -- processors -----------------------------------------------------------------------------------

# Of what probes reach on the same cores, octavo's kernels (benchmarks/results of 2026-11-22, two
# vCPUs of an EPYC and of a Xeon with neighbours; models of 4 bits): a lone stream 0.70 to 0.89 of
# the bandwidth with all that surrounds reading, prompts 0.38 to 0.58 of the products. Batches of 8
# and 32 take nearly as long as reading and products together: on few cores they overlap badly.
# Operations alone then come to 0.97 to 1.22 of the step times of the one, 0.67 to 0.84 of those of
# the other.
_CPU = Efficiency(
    memory=0.90,
    compute=0.48,
    attention_compute=0.30,
    sharpness=1.5,
    launch_s=1e-6,  # a barrier of all threads
    step_s=0.1e-3,  # 56 to 157 us with one sequence, 418 to 524 with eight
    sequence_s=40e-6,
    spread=0.35,
    overhead_spread=1.0,
)
# Of a sheet: 0.75 to 0.85 of the channels' bandwidth is reached at all, and clocks fall.
_SHEET_MEMORY, _SHEET_COMPUTE = 0.80, 0.90


def _on_cpu(device: Device) -> Efficiency:
    if device.is_measured:
        return _CPU
    return replace(
        _CPU,
        memory=_CPU.memory * _SHEET_MEMORY,
        compute=_CPU.compute * _SHEET_COMPUTE,
        attention_compute=_CPU.attention_compute * _SHEET_COMPUTE,
        spread=0.45,
    )
