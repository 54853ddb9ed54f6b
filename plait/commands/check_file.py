"""`plait check FILE`: forecasts the run of a configuration of another program on these machines, without running it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from plait.errors import PlaitError
from plait.foreign_configs.answer import CheckedConfig
from plait.foreign_configs.changes import helpful_change
from plait.foreign_configs.forecast import RunForecast, forecast
from plait.foreign_configs.reading import FORMATS, read_configuration
from plait.machines.cluster import Cluster, read_cluster
from plait.model.adapter_shape import Quantization
from plait.planner.problem.workload import Workload
from plait.planner.search.found import Search
from plait.planner.search.search import search
from plait.probing.survey import resources_of, survey_machine
from plait.workers import worker_pool
from plait.working_folder import CURRENT_FOLDER, WorkingFolder


def check_configuration(
    target: str, overrides: Sequence[str] = (), *, cluster: str | None = None, working: WorkingFolder = CURRENT_FOLDER
) -> CheckedConfig:
    """Forecast the run of a configuration file, or of a command line given as one text, on a named cluster or on this
    machine; raises PlaitError if the file cannot be read or lacks a value."""
    name, run = read_configuration(target, overrides)
    machines = read_cluster(cluster) if cluster is not None else _this_machine(working)
    found = forecast(run, machines)
    one = next(one for one in FORMATS if one.name == name)
    return CheckedConfig(format=name, found=found, change=helpful_change(found, machines, one), plaits=_by_plait(found))


def _this_machine(working: WorkingFolder) -> Cluster:
    with worker_pool(working) as workers:
        resources = resources_of(survey_machine(workers), workers)
    if not resources.has_known_devices:
        raise PlaitError(f"{resources.machine.name} is not in plait's catalogue; name machines with --cluster")
    return resources.as_cluster(resources.machine.devices if resources.machine.device != "cpu" else 1)


def _by_plait(found: RunForecast) -> Search | PlaitError:
    """The layout that plait would choose for the same model, batch and devices, in bf16 where it can, else float32, and
    with frozen weights in as many bits."""
    has_bf16 = "bf16" in found.cluster.islands[0].device.peak_flops
    same = found.workload
    own: Workload = replace(
        same,
        precision="bf16" if has_bf16 else "float32",
        attention="flash",
        expert_ranks="copies",
        quantization=_QUANTIZATIONS[found.run.quantized_bits],
    )
    try:
        return search(own, found.cluster)
    except PlaitError as error:
        return error


_QUANTIZATIONS: Mapping[int, Quantization] = {0: "none", 4: "nf4", 8: "int8"}
