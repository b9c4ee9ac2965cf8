# Names of the package for type checkers; at run time `__getattr__` imports each when it is used.

from octavo.planner.answer import Plan, Question, plan
from octavo.planner.deployment import CalibratedSteps, Deployment
from octavo.planner.formulas import formulas_json
from octavo.planner.report import plan_json
from octavo.planner.sizing import search
from octavo.planner.slo import Slo, parse_slo
from octavo.planner.step import step_cost
from octavo.planner.traffic import Traffic
from octavo.planner.verdict import Verdict, judge

__all__ = [
    "CalibratedSteps",
    "Deployment",
    "Plan",
    "Question",
    "Slo",
    "Traffic",
    "Verdict",
    "formulas_json",
    "judge",
    "parse_slo",
    "plan",
    "plan_json",
    "search",
    "step_cost",
]
