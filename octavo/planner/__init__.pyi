# Where the names of the package are: type checkers read it, and at run time `lazy_exports`.

from octavo.planner.answer import Plan as Plan
from octavo.planner.answer import Question as Question
from octavo.planner.answer import plan as plan
from octavo.planner.deployment import CalibratedSteps as CalibratedSteps
from octavo.planner.deployment import Deployment as Deployment
from octavo.planner.formulas import formulas_json as formulas_json
from octavo.planner.report import plan_json as plan_json
from octavo.planner.sizing import search as search
from octavo.planner.slo import Slo as Slo
from octavo.planner.slo import parse_slo as parse_slo
from octavo.planner.step import step_cost as step_cost
from octavo.planner.traffic import Traffic as Traffic
from octavo.planner.verdict import Verdict as Verdict
from octavo.planner.verdict import judge as judge
