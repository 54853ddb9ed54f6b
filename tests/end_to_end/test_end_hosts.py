"""Two hosts, which are two addresses and two folders of this machine, train as one host does."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.end_to_end.command import STEPS, Ended, Place, ended, kill_group, wait_while_running
from tests.end_to_end.pair import EVEN, Pair
from tests.interop.folders import write_model


def test_two_hosts_in_folders_of_their_own_give_the_bits_of_one(
    pair: Pair, reference: Callable[[int], str], tmp_path: Path
) -> None:
    """And who does not know the secret, or comes when all are in, does not disturb them."""
    name = "two-hosts"
    lead = pair.start_lead(name, *EVEN)
    wrong = tmp_path / "wrong"
    wrong.write_text("0000-0000-0000-0000-0000-0000-0000")
    wrong.chmod(0o600)
    refused = ended(pair.start_join(secret=wrong), within_s=30)
    assert refused.code == 2 and "secret" in refused.sentence()
    guest = pair.start_join()
    wait_while_running((pair.lead.path(name) / "plan.json").exists, lead)
    late = ended(pair.start_join(Place(tmp_path / "third")), within_s=30)
    assert late.code == 2 and "layout needs 2 workers, and the run has 2 hosts" in late.sentence()
    first, second = ended(lead), ended(guest)
    assert (first.code, second.code) == (0, 0) and not first.err + second.err, (first, second)
    assert second.out.count("\nreceived ") == 1 and "here already" not in second.out
    assert_same_end(pair.lead, name, reference(2))
    pair.assert_nothing_left()
    assert not list((pair.other.path(name) / "checkpoints").glob("step-*"))
    assert_secret_is_nowhere(pair, first, second, late, refused)


def test_a_host_that_waits_for_others_ends_in_peace_when_it_is_told_to(pair: Pair) -> None:
    lead = pair.start_lead("waits")
    lead.terminate()
    stopped = ended(lead, within_s=30)
    assert stopped.code == 143 and not stopped.err, stopped
    assert not pair.lead.path("waits").exists()
    pair.assert_nothing_left()


@pytest.mark.slow
def test_a_lost_host_that_the_layout_needs_ends_the_run_and_both_commands_go_on_with_it(
    pair: Pair, reference: Callable[[int], str]
) -> None:
    name, place = "two-hosts-lost", pair.lead
    lead, guest = pair.start(name, *EVEN)
    wait_while_running(lambda: bool(place.checkpoints(name)), lead)
    at = time.monotonic()
    guest.kill()
    lost = ended(lead, within_s=30)
    assert time.monotonic() - at < 15
    assert lost.code == 1 and "was lost" in lost.sentence() and "the same command goes on" in lost.sentence(), lost
    ended(guest)
    for one in (place, pair.other):
        one.assert_nobody_left()
    kept = place.checkpoints(name)[-1]
    assert kept < STEPS
    first, second = (ended(process) for process in pair.start(name, *EVEN))
    assert (first.code, second.code) == (0, 0), (first, second)
    assert f"resume   from step-{kept}" in first.out and "here already" in second.out
    assert_same_end(place, name, reference(2))
    pair.assert_nothing_left()
    assert [path.name for path in (pair.other.path(name) / "checkpoints").iterdir()] == [f"step-{kept}"]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["lead, in a folder that both share", "guest"])
def test_ctrl_c_on_either_host_saves_and_ends_both(pair: Pair, reference: Callable[[int], str], where: str) -> None:
    name, is_shared = f"two-hosts-stopped-on-{where[:4]}", where != "guest"
    if is_shared:
        pair.other = pair.lead
    lead, guest = pair.start(name, *EVEN)
    wait_while_running(lambda: bool(pair.lead.checkpoints(name)), lead)
    kill_group(guest if where == "guest" else lead, signal.SIGINT)
    first, second = ended(lead), ended(guest)
    assert (first.code, second.code) == (130, 130), (first, second)
    assert ("sent  " in first.out, "is shared with it" in second.out) == (not is_shared, is_shared)
    step = pair.lead.checkpoints(name)[-1]
    assert step < STEPS and f"stopped after step {step} of {STEPS}, saved" in first.out
    pair.assert_nothing_left()
    # It goes on where one host has both workers.
    last = pair.lead.train(name, *EVEN, "--no-check")
    assert last.code == 0 and f"resume   from step-{step}" in last.out, last
    assert pair.lead.plan(name)["hosts"] == []
    assert_same_end(pair.lead, name, reference(2))


@pytest.mark.slow
def test_when_host_0_dies_the_other_one_ends_with_its_name(pair: Pair) -> None:
    name = "two-hosts-headless"
    lead, guest = pair.start(name)
    wait_while_running(lambda: bool(pair.lead.checkpoints(name)), lead)
    at = time.monotonic()
    lead.kill()
    alone = ended(guest, within_s=30)
    assert time.monotonic() - at < 15
    assert alone.code == 1 and "127.0.0.1" in alone.sentence(), alone
    ended(lead)
    for one in (pair.lead, pair.other):
        one.assert_nobody_left()
    assert not list((pair.other.path(name) / "checkpoints").glob(".*"))


@pytest.mark.slow
def test_a_worker_that_dies_on_the_other_host_is_told_with_its_host(pair: Pair) -> None:
    name = "two-hosts-dead-worker"
    lead, guest = pair.start(name, 'recover.mode="never"')
    wait_while_running(lambda: bool(pair.lead.checkpoints(name)), lead)
    os.kill(pair.other.rank_process(name, 1), signal.SIGKILL)
    first, second = ended(lead, within_s=30), ended(guest, within_s=30)
    assert (first.code, second.code) == (1, 1), (first, second)
    assert first.sentence().startswith("rank 1 on ") and "SIGKILL" in first.sentence()
    pair.assert_nothing_left()


@pytest.mark.slow
def test_a_worker_that_is_stopped_on_the_other_host_is_named_and_both_commands_go_on(
    pair: Pair, reference: Callable[[int], str]
) -> None:
    """Killed ones are in test_end_hosts_layouts.py."""
    name = "two-hosts-sigstop"
    lead, guest = pair.start(name, *EVEN, "recover.state_every=4")
    wait_while_running(lambda: bool(pair.lead.checkpoints(name)), lead)
    os.kill(pair.other.rank_process(name, 1), signal.SIGSTOP)
    first, second = ended(lead), ended(guest)
    assert (first.code, second.code) == (0, 0) and not first.err + second.err, (first, second)
    assert_same_end(pair.lead, name, reference(2))
    lines = (pair.lead.path(name) / "incidents.jsonl").read_text().splitlines()
    incident, back = map(json.loads, lines)
    assert incident["rank"] == 1 and incident["host"] and incident["decision"] == "started again"
    assert incident["from_copies"] and incident["steps_lost"] <= 4 and "kept in memory" in first.out
    assert incident["cause"] == "hung" and back["back_after_s"] > 0
    pair.assert_nothing_left()


@pytest.mark.slow
def test_what_cannot_begin_is_told_in_a_sentence(pair: Pair, tmp_path: Path) -> None:
    lead = pair.start_lead("two-hosts-waiting")
    taken = pair.lead.run(
        *("train", "tiny.toml", "run.name=taken", "--hosts", "2", "--address", "127.0.0.1"),
        *("--port", str(pair.port), "--secret-file", str(pair.secret)),
    )
    assert taken.code == 2 and str(pair.port) in taken.sentence()
    kill_group(lead, signal.SIGINT)
    assert ended(lead).code == 130
    foreign = pair.lead.run("train", "tiny.toml", "--hosts", "2", "--address", "203.0.113.7")
    assert foreign.code == 2 and "203.0.113.7 is not an address of this machine" in foreign.sentence()
    nobody = ended(pair.start_join(), within_s=30)
    assert nobody.code == 2 and "no run accepts hosts" in nobody.sentence()
    odd = pair.other.run("join", "somewhere", "--secret-file", str(pair.secret))
    assert odd.code == 2 and '"somewhere" is not HOST:PORT' in odd.sentence()
    pair.assert_nothing_left()


@pytest.mark.slow
def test_a_layout_for_other_workers_is_refused_on_host_0(pair: Pair) -> None:
    lead, guest = pair.start("two-hosts-three", "layout.replicate=3")
    first, second = ended(lead), ended(guest)
    assert first.code == 2 and "needs 3 workers, and the hosts have 2" in first.sentence()
    assert second.code != 0 and "needs 3 workers" in second.sentence()
    pair.assert_nothing_left()


@pytest.mark.slow
def test_a_host_that_cannot_keep_the_data_says_so_itself(pair: Pair) -> None:
    (pair.other.folder / ".plait").write_text("a file where the folder should be")
    lead, guest = pair.start("two-hosts-no-data")
    first, second = ended(lead), ended(guest)
    assert (first.code, second.code) == (2, 2), (first, second)
    assert second.sentence().startswith("this host cannot write ") and "then join again" in second.sentence()
    assert first.sentence().startswith("on ") and "this host cannot write" in first.sentence()
    pair.assert_nothing_left()


def assert_same_end(place: Place, name: str, reference: str) -> None:
    assert place.numbers(name) == place.numbers(reference)
    assert place.manifest(name) == place.manifest(reference)


def assert_secret_is_nowhere(pair: Pair, *ends: Ended) -> None:
    """Not in what was said, nor in any file of the two folders."""
    secret = pair.secret.read_text().strip()
    assert len(secret) > 20
    for end in ends:
        assert secret not in end.out + end.err
    for place in (pair.lead, pair.other):
        for path in place.folder.rglob("*"):
            assert not path.is_file() or secret.encode() not in path.read_bytes(), path


@pytest.mark.slow
def test_a_check_looks_at_both_hosts_and_the_link_between_them(pair: Pair) -> None:
    lead, guest = pair.start_command("probe", "tiny.toml", "--check"), pair.start_join()
    first, second = ended(lead, within_s=90), ended(guest, within_s=30)
    assert (first.code, second.code) == (0, 0) and not first.err + second.err, (first, second)
    words = [line.split()[0] for line in first.out.splitlines()]
    told = words[words.index("devices") :]
    assert told == ["devices", "links", "sums", *(["memory", "disk", "software"] * 2), "verdict"], first.out
    assert "links    the link answers" in first.out and "over 2 workers is right" in first.out
    assert first.out.endswith("verdict  ready to train\n")
    pair.assert_nothing_left()


FURTHER = """
[model]
from = "base"

[data]
files = "play.txt"

[train]
sequence = 16
batch_tokens = 112
budget = "12 steps"
matmul_backend = "default"

[layout]
replicate = 2
micro_sequences = 2

[report]
evaluate = "6 steps"
"""


@pytest.fixture
def recipe_from_base(pair: Pair) -> Iterator[None]:
    """In the place of the recipe of all tests, for one test."""
    path = pair.lead.folder / "tiny.toml"
    before = path.read_text()
    path.write_text(FURTHER)
    yield
    path.write_text(before)


PIPELINE = ("layout.replicate=1", "layout.pipeline=2", "layout.stage_layers=[2, 2]", "balance.every=never")
TUNED = {"adapters": (*EVEN, "finetune.method=lora"), "all weights in a pipeline": PIPELINE}


@pytest.mark.slow
@pytest.mark.parametrize("tuned", TUNED)
def test_a_model_goes_on_learning_on_two_hosts_as_on_one(pair: Pair, recipe_from_base: None, tuned: str) -> None:
    """The other host has no model of its own: the weights are sent to it, once for all starts."""
    stem = f"further-{tuned.replace(' ', '-')}"
    write_model(pair.lead.folder / "base", shard_size="20KB")
    alone = pair.lead.train(f"{stem}-alone", *TUNED[tuned], "--no-check")
    assert alone.code == 0, alone
    for name in (stem, f"{stem}-again")[: 2 if tuned == "adapters" else 1]:
        lead, guest = (ended(process) for process in pair.start(name, *TUNED[tuned]))
        assert (lead.code, guest.code) == (0, 0) and not lead.err + guest.err, (lead, guest)
        assert pair.lead.numbers(name) == pair.lead.numbers(f"{stem}-alone")
        assert pair.lead.manifest(name, 12) == pair.lead.manifest(f"{stem}-alone", 12)
        pair.assert_nothing_left()
        assert ("of weights to begin with to" in lead.out) == (name == stem), lead.out
    models = pair.other.folder / ".plait" / "received" / "models"
    assert len(list(models.iterdir())) == 1 and not (pair.other.folder / "base").exists()
