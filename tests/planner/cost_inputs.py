"""Cost inputs in one short line."""

from plait.machines.cluster import Cluster
from plait.planner.problem.candidates import Candidates
from plait.planner.problem.software_profile import SoftwareProfile
from plait.planner.problem.workload import Workload
from plait.planner.step_time.cost_inputs import CostInputs


def inputs(workload: Workload, cluster: Cluster, candidates: Candidates, profile: SoftwareProfile) -> CostInputs:
    """Their order is that of a sentence: a workload on a cluster, in these layouts, run by this software."""
    return CostInputs(workload=workload, cluster=cluster, candidates=candidates, profile=profile)
