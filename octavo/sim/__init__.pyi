# Where the names of the package are: type checkers read it, and at run time `lazy_exports`.

from octavo.sim.fleet import FleetSpec as FleetSpec
from octavo.sim.prompts import PromptSpec as PromptSpec
from octavo.sim.replica import ReplicaSpec as ReplicaSpec
from octavo.sim.report import SimulationReport as SimulationReport
from octavo.sim.settings import ClientSettings as ClientSettings
from octavo.sim.settings import FleetSettings as FleetSettings
from octavo.sim.setup import Simulation as Simulation
from octavo.sim.setup import prepare as prepare
from octavo.sim.simulation import SimulationResult as SimulationResult
from octavo.sim.simulation import simulate as simulate
from octavo.sim.timeline import Timeline as Timeline
from octavo.workload.plan import LoadPlan as LoadPlan
from octavo.workload.settings import LoadSettings as LoadSettings
from octavo.workload.settings import Workload as Workload
