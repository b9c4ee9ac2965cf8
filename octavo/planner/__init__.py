"""Planning: does it fit, how fast is it, for how many, at what cost, what binds, what to change.

    from octavo.planner import Traffic, plan

    found = plan("llama-3.1-8b", "h100-sxm", Traffic(1024, 256, rate=10), slo="ttft=500,tpot=50")
    print(found.is_feasible, found.service.latency(99).tpot, found.bill.per_million_output_tokens)

    plan -> deployment -> together, steady_state what becomes of traffic, by what steps cost
            verdict, sizing, advice              whether that will do, what would, what would help
            queueing, money, slo                 formulas

All of it is formula on `octavo.cost`, in plain Python.
"""

from octavo.planner.deployment import Deployment
from octavo.planner.plan import Plan, Question, open_model, plan
from octavo.planner.report import plan_json
from octavo.planner.sizing import search
from octavo.planner.slo import Slo, parse_slo
from octavo.planner.traffic import Traffic
from octavo.planner.verdict import Verdict, judge

__all__ = [
    "Deployment",
    "Plan",
    "Question",
    "Slo",
    "Traffic",
    "Verdict",
    "judge",
    "open_model",
    "parse_slo",
    "plan",
    "plan_json",
    "search",
]
