"""Planning of deployments: whether a model fits, its speed, concurrency and cost, what binds, and
what helps.

    from octavo.planner import Traffic, plan

    found = plan("llama-3.1-8b", "h100-sxm", Traffic(1024, 256, rate=10), slo="ttft=500,tpot=50")
    print(found.is_feasible, found.service.latency(99).tpot, found.bill.per_million_output_tokens)

    answer -> deployment -> closed_batch, steady_state   latency and throughput, from step costs
              verdict, sizing, advice                feasibility, sizes that do, improvements
              queueing, money, slo                   formulas

All of it is formulas over `octavo.cost`, in plain Python. Importing this package is cheap: a name
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
