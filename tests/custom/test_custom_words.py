"""What a spread program prints: each choice once, with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from plait.commands.programs.program_file import ProgramFile
from plait.commands.programs.run_program import workers_text
from plait.custom.data.share_words import measuring_text, shares_stay_text, worker_shares_text
from plait.custom.group import check_backends, check_same_devices
from plait.custom.layouts.bucket_size import LEAST, MOST, chosen_bucket_bytes
from plait.custom.layouts.units import find_units, units_text
from plait.custom.process.started_worker import StartedWorker, first_host, gpu_or_processor, started_worker
from plait.custom.program import Program
from plait.custom.seeds import seed_everything
from plait.custom.stepping.fused import fused_text
from plait.custom.stepping.rate import goyal_rule
from plait.errors import PlaitError
from plait.hosts.joining import invitation_text
from plait.parallel.gradient_norm import squares_of

GOLDEN = Path(__file__).parents[1] / "golden" / "own-programs.txt"


def lines() -> list[str]:
    names = ("big", "worker 1 on pair", "worker 2 on pair")
    many = [f"worker {number}" for number in range(9)]
    layers = nn.ModuleDict({"body": nn.ModuleList(nn.Linear(2, 2) for _ in range(4)), "head": nn.Linear(2, 2)})
    return [
        workers_text([1], None),
        workers_text([4], Path(".plait/programs/my")),
        workers_text([4, 1], Path(".plait/programs/my")),
        measuring_text(8),
        shares_stay_text(names, (0.2, 0.195, 0.21)),
        worker_shares_text(names, (20, 20, 20), (36, 12, 12), (300.0, 100.0, 100.0)),
        shares_stay_text(many, [0.2] * 9),
        worker_shares_text(many, [8] * 9, [9] * 8 + [1], [100.0] * 8 + [10.0]),
        units_text(find_units(layers, "auto")),
        units_text({}),
        fused_text(["Adam", "SGD", "Adam"]),
        invitation_text(1, "10.0.0.1:29500", "with the secret", ProgramFile(path=Path("folder/my.py")).join_options),
    ]


def test_what_is_said_is_as_it_was_read() -> None:
    assert "\n".join(lines()) + "\n" == GOLDEN.read_text()


def test_a_worker_is_told_by_the_environment_of_whoever_started_it() -> None:
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a",
                "MASTER_PORT": "1"}  # fmt: skip
    told = started_worker(torchrun)
    assert told is not None and (told.rank, told.size, told.local_rank, told.rendezvous) == (3, 4, 1, "env://program")
    ours = started_worker({**torchrun, "PLAIT_RENDEZVOUS": "/tmp/x"})
    assert ours is not None and ours.rendezvous == "/tmp/x"
    slurm = {"SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "41",
             "SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_STEP_NUM_NODES": "2"}  # fmt: skip
    there = started_worker(slurm)
    assert there is not None and (there.rank, there.local_size) == (2, 2)
    assert there.rendezvous == "srun://gpu03:20041"
    assert started_worker({}) is None and started_worker({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None
    assert [first_host(text) for text in ("a", "a,b", "n[1,4-5],m", "x-[07]")] == ["a", "a", "n1", "x-07"]


@pytest.mark.parametrize(
    ("counts", "node", "tasks"),
    [("4", "0", 4), ("2(x3),1", "2", 2), ("2(x3),1", "3", 1), ("1,3", "1", 3), ("", "1", 3)],
)
def test_slurm_says_how_many_tasks_each_node_has(counts: str, node: str, tasks: int) -> None:
    told = started_worker(
        {"SLURM_NTASKS": "6", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "a,b",
         "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": counts, "SLURM_NODEID": node}
    )  # fmt: skip
    assert told is not None and told.local_size == tasks


@pytest.mark.parametrize(
    ("environment", "seen", "own"),
    [
        ({"SLURM_GPUS_PER_TASK": "1"}, 1, 0),  # bound to each task
        ({"SLURM_GPUS_ON_NODE": "4"}, 1, 0),
        ({"SLURM_GPUS_ON_NODE": "8"}, 2, 0),
        ({"SLURM_GPUS_ON_NODE": "4"}, 4, 2),
        ({"SLURM_GPUS_PER_TASK": "1"}, 4, 2),  # --gpu-bind=none
        ({"SLURM_GPUS_ON_NODE": "1"}, 1, None),  # fewer than tasks
        ({}, 1, None),
    ],
)
def test_each_of_sruns_tasks_takes_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], seen: int, own: int | None
) -> None:
    told = started_worker(
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "2", "SLURM_STEP_NODELIST": "a", **environment}
    )
    assert told is not None
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    if own is None:
        with pytest.raises(PlaitError, match=r"4 workers on a machine with 1 GPU; start 1, or hide the GPUs"):
            gpu_or_processor(told)
    else:
        assert gpu_or_processor(told) == torch.device("cuda", own) and taken == [own]


def test_workers_with_a_gpu_and_without_one_are_told_apart_before_they_wait_for_each_other() -> None:
    store = dist.HashStore()
    first, second = (StartedWorker(rank=rank, size=2, local_rank=0, local_size=1, rendezvous="") for rank in (0, 1))
    check_same_devices(store, first, torch.device("cuda", 0))
    check_same_devices(store, second, torch.device("cuda", 3))
    with pytest.raises(PlaitError, match="worker 1 has no GPU that torch sees and worker 0 has a GPU"):
        check_same_devices(store, second, torch.device("cpu"))


def test_a_worker_without_gradients_sums_on_the_device_of_the_others() -> None:
    """Else it waits in gloo while they are in NCCL."""
    assert squares_of([], torch.device("meta")).device.type == "meta"
    assert squares_of([torch.ones(4)]).item() == 4 and squares_of([]).item() == 0


def test_a_group_without_connections_between_processors_is_refused() -> None:
    for config in ("cpu:gloo", "cpu:gloo,cuda:gloo", "cuda:nccl,cpu:gloo"):
        check_backends(config)
    with pytest.raises(PlaitError, match="leave init_process_group out"):
        check_backends("cuda:nccl")


def test_seeds_are_those_of_torch() -> None:
    seed_everything(7)
    found = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(found, torch.rand(3))


def test_goyals_rule_grows_in_a_line() -> None:
    rule = goyal_rule(4, 10)
    assert [rule.factor(step) for step in (0, 24, 49, 1000)] == [1.06, 2.5, 4.0, 4.0]
    assert goyal_rule(4, None).warm_steps == 500 and goyal_rule(4, 10**6).warm_steps == 500


def test_units_are_members_of_rows_and_no_unit_lies_in_another() -> None:
    block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    inner = nn.ModuleList([nn.Linear(2, 2)])
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(block, nn.Sequential(inner, nn.ReLU())))
    assert list(find_units(model, "auto")) == ["1.0", "1.1"]
    assert list(find_units(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "auto")) == []
    assert list(find_units(model, ("0",))) == ["0"]


def test_a_bucket_is_large_enough_for_its_start() -> None:
    assert chosen_bucket_bytes(1e-3, 1e9, 10**9) == 16 * 2**20
    assert chosen_bucket_bytes(1e-5, 1e8, 10**9) == LEAST
    assert chosen_bucket_bytes(1.0, 1e9, 10**12) == MOST
    assert chosen_bucket_bytes(1e-3, 1e9, 20 * 2**20) == 4 * 2**20


def test_tied_weights_and_models_in_a_tuple_have_one_name_each() -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    two.weight = one.weight
    optimizer = torch.optim.SGD([one.weight, one.bias, two.bias], lr=0.1)
    program = Program(models=(one, two), optimizers=(optimizer,), losses=(print,), single=False)
    assert list(program.named_parameters()) == ["0.weight", "0.bias", "1.bias"]
    assert program.trained_names == (("0.weight", "0.bias", "1.bias"),)
