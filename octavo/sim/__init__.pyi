# Names of the package for type checkers; at run time `__getattr__` imports each when it is used.

from octavo.sim.demand import PromptSpec
from octavo.sim.fleet import FleetSpec
from octavo.sim.replica import ReplicaSpec
from octavo.sim.report import SimulationReport
from octavo.sim.settings import ClientSettings, FleetSettings
from octavo.sim.setup import Simulation, prepare
from octavo.sim.simulation import SimulationResult, simulate
from octavo.sim.timeline import Timeline
from octavo.workload.plan import LoadPlan
from octavo.workload.settings import LoadSettings, Workload

__all__ = [
    "ClientSettings",
    "FleetSettings",
    "FleetSpec",
    "LoadPlan",
    "LoadSettings",
    "PromptSpec",
    "ReplicaSpec",
    "Simulation",
    "SimulationReport",
    "SimulationResult",
    "Timeline",
    "Workload",
    "prepare",
    "simulate",
]
