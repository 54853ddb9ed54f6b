"""The probe as ranks run it: a whole one of a small model, a link that is dead, and what is kept."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.commands.probe import choose_probe_workers, probe_request_for
from plait.errors import Interrupted, PlaitError
from plait.launch.local.run import ForkServer
from plait.launch.values.entries import EntryTable
from plait.launch.values.job import Job, JobResult, Message, RankContext, StoppedBy
from plait.machines.machine import detect_cpu_machine
from plait.machines.measured import WORK_SIZES, measurements_from_json, measurements_json, measurements_table
from plait.machines.requested_workers import RequestedWorkers
from plait.model.sizes import explicit_shape
from plait.planner.derive.resources import FixedWorkers
from plait.probing.answer import parse_result
from plait.probing.arithmetic import device_failure
from plait.probing.measurements import StoredProbe, measurements_from
from plait.probing.rank import teller_of
from plait.probing.request import ProbeRequest, layer_products, model_probe_request, typical_probe_request
from plait.probing.survey import MachineSurvey
from plait.workers import ENTRIES, PROBE_ENTRY, PROGRESS, SYMBOLIC_SHAPES
from plait.working_folder import CURRENT_FOLDER
from tests.entry_tables import entries_of

SHAPE = explicit_shape(layers=2, width=64, vocabulary=256, sequence=32)


def small_request() -> ProbeRequest:
    whole = model_probe_request(SHAPE, sequence=32, sequences=4, device="cpu", precision="float32", threads=1)
    small = {
        "seconds": 0.1,
        "messages": (2**10, 2**16, 2**22),
        "products": sorted({p for s in whole.models for p in layer_products(s)}),
    }
    return ProbeRequest.from_json(json.dumps({**json.loads(whole.to_json()), **small}))


NEEDS = (SYMBOLIC_SHAPES,)
"""As the jobs of plait probe."""
TABLE = EntryTable(
    functions={**ENTRIES.functions, **entries_of("tests.probing.probe_entries").functions},
    optional=ENTRIES.optional,
    preload=("plait.probing.rank",),
)


def stored_probe() -> StoredProbe:
    """The small probe of two workers of this machine."""
    workers = FixedWorkers(workers=2, threads=1)
    return StoredProbe(machines=[detect_cpu_machine()], request=small_request(), workers=workers)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer(TABLE) as one:
        yield one


@pytest.fixture(scope="module")
def messages(server: ForkServer) -> list[Message]:
    """All that two ranks of a whole probe told."""
    found: list[Message] = []
    job = Job(entry=PROBE_ENTRY, argument=small_request().to_json(), world_size=2, threads=1, needs=NEEDS)
    server.run(job, on_message=found.append)
    return found


@pytest.fixture(scope="module")
def told(messages: list[Message]) -> dict[str, Any]:
    """What two ranks of a whole probe measured."""
    (message,) = (one for one in messages if one.kind == "probed")
    return dict(message.values)


def test_a_probe_tells_how_far_it_is(messages: list[Message]) -> None:
    told = [one.values for one in messages if one.kind == PROGRESS]
    assert messages[-1].kind == "probed" and {one.rank for one in messages} == {0}
    assert list(dict.fromkeys(one["stage"] for one in told)) == [
        "timing messages between workers", "timing the arithmetic of a step", "timing sums over all workers",
    ]  # fmt: skip
    done = [one["done"] for one in told]
    assert done == sorted(done) and done[0] == 0 and done[-1] < 100 == told[0]["total"]


def test_progress_is_told_by_rank_0_once_a_second_and_at_each_stage() -> None:
    told, now_s = list[tuple[int, str]](), [0.0]
    context = RankContext(
        rank=0, world_size=2, local_rank=0, local_world_size=2, threads=1, rendezvous="",
        channel=lambda kind, values: told.append((values["done"], values["stage"])), stop=lambda: False,
    )  # fmt: skip
    tell = teller_of(context, clock=lambda: now_s[0])
    other = teller_of(replace(context, rank=1), clock=lambda: now_s[0])
    for moment, share in enumerate((0.0, 0.1, 0.2, 0.5, 0.9)):
        now_s[0] = 0.4 * moment
        tell("arithmetic", share)
        other("arithmetic", share)
    tell("sums", 0.0)
    assert [done for done, _ in told] == [15, 42, 70] and told[-1][1] == "timing sums over all workers"


def test_what_a_person_sees_of_it(told: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown: list[tuple[int, int, str]] = []
    hands = Remembered(told, progress=[{"done": 15, "total": 100, "stage": "timing"}])
    stored_probe().measure(hands, lambda *told: shown.append(told))
    assert shown == [(15, 100, "timing")]


@pytest.mark.slow
def test_a_layers_time_holds_no_finding_of_pages(server: ForkServer) -> None:
    shape = explicit_shape(layers=2, width=128, vocabulary=256, sequence=256)
    request = model_probe_request(shape, sequence=256, sequences=16, device="cpu", precision="float32", threads=1)
    messages: list[Message] = []
    job = Job(entry="count_pages", argument=request.to_json(), world_size=1, threads=1, needs=NEEDS)
    server.run(job, on_message=messages.append)
    layer_bytes = 4 * 4096 * 12 * 128  # at the least, of the largest scene alone
    for found in messages[0].values.values():
        assert found < layer_bytes / resource.getpagesize() / 10


def test_two_ranks_measure_every_kind_of_work_and_message(told: dict[str, Any]) -> None:
    measured = measurements_from(parse_result(told), small_request(), "key")
    (device,) = measured.devices
    assert {one.work for one in device.timed} == set(WORK_SIZES)
    assert device.workers == 2 and len(device.rates) == 2 and max(device.rates) == 1
    assert {"product", "stream", "head", "update", "copy"} <= set(device.beside)
    kinds = {link.kind for link in measured.links}
    assert kinds == {
        "send", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "swap_parts", "spread_own",
    }  # fmt: skip
    for link in measured.links:
        assert (link.scope, link.ranks) == ("inside", 2)
        assert [point.bytes for point in link.points] == [2**10, 2**16, 2**22]
        assert link.points[-1].seconds > 2**22 / 1e12, "no memory is as fast as that"
        assert any(point.cpu_s > 0 for point in link.points)
    assert any(link.points[-1].seconds > link.points[0].seconds for link in measured.links)
    (overlap,) = measured.overlaps
    assert 2**20 <= overlap.bytes <= 16 * 2**23 and 0 <= overlap.hidden_share <= 1
    assert measurements_from_json(measurements_json(measured), "here") == measured


def test_products_run_at_a_speed_that_processors_have(told: dict[str, Any]) -> None:
    (device,) = measurements_from(parse_result(told), small_request(), "key").devices
    for work in ("product", "product_input", "product_weight"):
        rates = [2 * one.sizes[0] * one.sizes[1] * one.sizes[2] / one.seconds for one in device.times_of(work)]
        assert 1e8 < max(rates) < 1e13


def test_the_table_tells_it_to_people(told: dict[str, Any]) -> None:
    text = measurements_table(measurements_from(parse_result(told), small_request(), "key"))
    for words in ("matrix products", "side by side", "all-reduce", "is hidden", "GFLOP/s", "CPU s a GiB"):
        assert words in text
    assert all(len(line) < 200 for line in text.splitlines())


@pytest.mark.slow
def test_two_hosts_are_measured_inside_and_between(server: ForkServer) -> None:
    messages: list[Message] = []
    request = replace(small_request(), messages=(2**10, 2**16))
    server.run(
        Job(entry="on_two_hosts", argument=request.to_json(), world_size=3, threads=1, needs=NEEDS),
        on_message=messages.append,
    )
    measured = measurements_from(parse_result(messages[-1].values), request, "key")
    first, second = measured.devices
    assert (first.workers, second.workers) == (2, 1) and first.host != second.host
    assert first.beside and not second.beside and len(first.rates + second.rates) == 3
    found = {(link.scope, link.hosts, link.ranks) for link in measured.links}
    both = (first.host, second.host)
    assert found == {("inside", (first.host,), 2), ("between", both, 2), ("between", both, 3)}
    assert sorted((one.scope, one.ranks) for one in measured.overlaps) == [("between", 3), ("inside", 2)]
    assert f"between {first.host} and {second.host}, 3 workers" in measurements_table(measured)


def test_a_device_that_cannot_compute_says_why() -> None:
    assert device_failure(torch.device("cpu")) is None
    assert device_failure(torch.device("meta"))


def test_a_link_that_does_not_answer_is_found_dead(server: ForkServer) -> None:
    messages: list[Message] = []
    job = Job(entry="silent_peer", argument="", world_size=2, threads=1)
    server.run(job, on_message=messages.append)
    assert [(message.rank, message.kind) for message in messages] == [(0, "dead")]


class Remembered:
    """Workers that tell what others told, and count how often they were asked."""

    fixed_workers = None
    working_folder = CURRENT_FOLDER

    def __init__(
        self, told: dict[str, Any], stopped_by: StoppedBy = "finished", progress: Sequence[dict[str, Any]] = ()
    ) -> None:
        self.told, self.stopped_by, self.jobs, self.progress = told, stopped_by, 0, progress

    def run(self, job: Job, on_message: Callable[[Message], None]) -> JobResult:
        self.jobs += 1
        assert job.at_stop == "abandon"
        for values in self.progress:
            on_message(Message(rank=0, kind=PROGRESS, values=values))
        on_message(Message(rank=0, kind="probed", values=self.told))
        return JobResult(stopped_by=self.stopped_by, wall_s=0.0)


def test_what_was_measured_is_kept_until_something_changes(
    told: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hands, same = Remembered(told), stored_probe()
    first = same.load_or_measure(hands, "kept")
    assert same.load_or_measure(hands, "kept") == first and hands.jobs == 1
    replace(same, workers=FixedWorkers(workers=2, threads=2)).load_or_measure(hands, "kept")
    replace(same, request=typical_probe_request("cpu", 1)).load_or_measure(hands, "kept")
    same.load_or_measure(hands, "again")
    assert hands.jobs == 4
    (tmp_path / ".plait" / "probes" / f"{first.fingerprint}.json").write_text("{")
    same.load_or_measure(hands, "kept")
    assert hands.jobs == 5


def test_what_was_found_to_hold_a_moment_ago_is_believed_without_a_look(
    told: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stored = stored_probe()
    cable, wireless = ("10.0.0.1", "10.0.0.2"), ("192.168.0.1", "192.168.0.2")
    assert not stored.was_checked_recently(cable)
    first = stored.measure(Remembered(told))
    assert not stored.was_checked_recently(cable)
    stored.mark_checked(cable)
    assert stored.was_checked_recently(cable) and not stored.was_checked_recently(wireless)
    an_hour_ago = time.time() - 3600
    os.utime(tmp_path / ".plait" / "probes" / f"{first.fingerprint}.seen", (an_hour_ago, an_hour_ago))
    assert not stored.was_checked_recently(cable)


def test_old_figures_hold_while_a_short_look_finds_about_the_same(told: dict[str, Any]) -> None:
    result, stored = parse_result(told), stored_probe()
    whole = measurements_from(result, small_request(), "key")
    known = replace(whole, devices=(replace(whole.devices[0], timed=result.ranks[0].timed),))
    assert stored.still_holds(Remembered(told), known)
    slower_road = {**told, "pairs": [slowed(pair, "points") for pair in told["pairs"]]}
    slower_host = {**told, "ranks": [slowed(rank, "timed") for rank in told["ranks"]]}
    for changed in (slower_road, slower_host):
        assert not stored.still_holds(Remembered(changed), known)
    others = replace(known, devices=(replace(known.devices[0], host="another"),))
    assert not stored.still_holds(Remembered(told), others)


def test_a_signal_in_the_midst_of_a_probe_ends_the_command_and_keeps_nothing(
    told: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stopped = Remembered(told, stopped_by="SIGINT")
    with pytest.raises(Interrupted, match="Ctrl-C"):
        stored_probe().load_or_measure(stopped, "kept")
    with pytest.raises(Interrupted, match="Ctrl-C"):
        stored_probe().still_holds(stopped, measurements_from(parse_result(told), small_request(), "key"))
    assert not (tmp_path / ".plait").exists()


def slowed(values: dict[str, Any], key: str) -> dict[str, Any]:
    return {**values, key: [{**one, "seconds": 2 * one["seconds"]} for one in values[key]]}


def test_workers_follow_the_cores_and_too_many_are_refused() -> None:
    machine, hands = detect_cpu_machine(), Remembered({})
    usual = choose_probe_workers(machine, None, None, hands)
    assert usual.workers * usual.threads == machine.cores and usual.threads == 1
    assert choose_probe_workers(machine, 1, None, hands) == FixedWorkers(workers=1, threads=machine.cores)
    with pytest.raises(PlaitError, match="choose fewer --workers or --threads"):
        choose_probe_workers(machine, machine.cores + 1, None, hands)


def test_a_probe_keeps_to_the_recipes_devices_and_workers() -> None:
    machine, hands = replace(detect_cpu_machine(), cores=8), Remembered({})
    named = RequestedWorkers(workers=2, threads=3)
    assert choose_probe_workers(machine, None, None, hands, named) == FixedWorkers(workers=2, threads=3)
    assert choose_probe_workers(machine, 4, 1, hands, named) == FixedWorkers(workers=4, threads=1), "options count more"
    with pytest.raises(PlaitError, match=r"run.workers = 9 are more than this machine has, 8 cores"):
        choose_probe_workers(machine, None, None, hands, RequestedWorkers(workers=9))
    some = replace(machine, device="cuda", name="NVIDIA H100 80GB HBM3", devices=2, gpus=(0, 2))
    site, extent = MachineSurvey(machine=some, peak_flops=None), FixedWorkers(workers=2, threads=4)
    request = probe_request_for(None, site, extent, CURRENT_FOLDER)
    assert request.gpus == (0, 2) and ProbeRequest.from_json(request.to_json()) == request


def test_a_request_reads_back_and_keeps_its_bounds() -> None:
    for request in (small_request(), typical_probe_request("cpu", 2), typical_probe_request("cuda", 1)):
        assert ProbeRequest.from_json(request.to_json()) == request
        assert len(set(request.products)) == len(request.products)
    large = explicit_shape(layers=2, width=2048, vocabulary=256, sequence=512)
    limited = model_probe_request(large, sequence=512, sequences=64, device="cpu", precision="float32", threads=1)
    assert max(model.sequences for model in limited.models) < 64
