"""Servers and their clients in virtual time: production's own engine, whose steps cost what a
function says. No torch.

    from octavo.sim import FleetSettings, LoadSettings, Workload, prepare

    load = LoadSettings(request_rate=8.0)
    workload = Workload(num_prompts=500, input_len=1000, output_len=200)
    report = prepare("llama-3.1-8b", FleetSettings(hardware="h100-sxm"), workload, load).run()
    print(report.as_text(), report.as_json()["p99_ttft_ms"])

`prepare` makes what `octavo simulate` runs. Below it, `simulate` takes any requests, any plan of
them, and any function of a batch as the time of a step. Importing this package is cheap: a name
below is imported when it is first used.
"""

from __future__ import annotations

from typing import Any

from octavo.base.lazy_exports import homes_of, named

_HOMES = homes_of(__file__)

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    return named(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return __all__
