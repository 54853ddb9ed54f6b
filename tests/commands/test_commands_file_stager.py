"""What travels to hosts that do not share the run's folder: all that a job needs, once, and into its own place."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.data.shards import open_corpus
from plait.errors import PlaitError, RunFailed
from plait.hosts.files import file_entries_of
from plait.hosts.job_files import FileStager, NamesReply, refuse_joined_folder
from plait.hosts.protocol import ReadReply, Reply, RequestKind
from plait.planner.plan_file import read_plan, write_plan
from plait.recipe.load import recipe_text
from plait.run_folder import RunFolder
from plait.workers import ROUTING
from tests.commands.neighbour import Neighbour, put
from tests.plans import changed
from tests.trainer.tiny import make_tiny

HOME = Path("runs") / "x"


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Neighbour]:
    neighbour = Neighbour(tmp_path / "there")
    yield neighbour
    neighbour.depot.close()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a run that has a plan, and data prepared in the usual place."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    config, plan = make_tiny(folder)
    (folder / "cache").rename(".plait")
    corpus = next(path for path in (folder / ".plait" / "data").iterdir() if path.is_dir())
    HOME.mkdir(parents=True)
    write_plan(replace(plan, job=replace(plan.job, corpus=str(corpus.relative_to(folder)))), HOME / "plan.json")
    (HOME / "recipe.toml").write_text(recipe_text(config))
    return folder


class Liar:
    """A neighbour that would have the file of a job lie elsewhere on host 0."""

    def __init__(self, honest: Neighbour, name_of_file: str) -> None:
        self.host, self.name, self.host_info = honest.host, honest.name, honest.host_info
        self._honest, self._name_of_file = honest, name_of_file

    def ask(self, request: RequestKind[Any, Any], question: Any, blob: bytes = b"") -> Reply[Any]:
        if request.name == "list":
            return Reply(values=NamesReply(names=(self._name_of_file,)))
        if request.name == "read":
            return Reply(values=ReadReply(size=4), blob=b"evil")
        return self._honest.ask(request, question, blob)


def job_folder(at: Path) -> Path:
    """The folder of a job on the run's own data."""
    at.mkdir()
    for name in ("plan.json", "recipe.toml"):
        (at / name).write_text((HOME / name).read_text())
    return at


def freight(*others: Neighbour) -> tuple[FileStager, list[str]]:
    """A stager, and what it says beside who shares the folder."""
    sender, told = speaking(*others)
    told[:] = [line for line in told if not line.startswith("folder ")]
    return sender, told


def speaking(*others: Neighbour) -> tuple[FileStager, list[str]]:
    told: list[str] = []
    return FileStager(others, HOME, told.append), told


def test_who_shares_the_folder_is_said_once(here: Path, other: Neighbour) -> None:
    same = Neighbour(here, 2)
    sender, told = speaking(same, other)
    sender.stage_job_files(HOME, "run")
    sender.stage_job_files(HOME, "run")
    shared, apart = [line for line in told if line.startswith("folder ")]
    assert (
        shared.startswith("folder   runs/x (") and ") is also that of host-2, which saw a file that was just" in shared
    )
    assert apart.startswith(f"folder   {other.name} shares no folder with this host: data are sent once")


def test_a_host_with_the_same_folder_is_sent_nothing(here: Path, tmp_path: Path) -> None:
    same = Neighbour(here)
    sender, told = freight(same)
    (place,) = sender.stage_job_files(HOME, "run")
    assert place.is_shared and Path(place.path) == here / HOME
    assert same.asked == ["see"] and not told
    assert sorted(path.name for path in (here / HOME).iterdir()) == ["plan.json", "recipe.toml"]
    assert not list((here / ".plait").glob("nonce-*"))


def test_data_that_a_job_before_the_run_brought_is_told_as_received_once(
    here: Path, other: Neighbour, tmp_path: Path
) -> None:
    sender, _ = freight(other)
    sender.stage_job_files(job_folder(tmp_path / "job"), "job")
    sender.stage_job_files(HOME, "run")
    data = [line for line in other.said if ".plait" in line]
    assert len(data) == 1 and data[0].startswith("received "), data
    again = Neighbour(other.folder)
    other.depot.close()
    freight(again)[0].stage_job_files(HOME, "run")
    assert any(line.endswith("here already") for line in again.said), "a later start finds it there"
    again.depot.close()


def test_data_that_were_sent_while_the_host_waited_are_not_sent_again(here: Path, other: Neighbour) -> None:
    sender, told = freight(other)
    sender.open_run_folder()
    sender.send_ahead()
    assert [line.split(" of ")[1] for line in told] == [f"prepared data to {other.name}"]
    later, told = freight(other)
    (place,) = later.stage_job_files(HOME, "run")
    assert not told and open_corpus(Path(read_plan(Path(place.path) / "plan.json").job.corpus)).verify() is None
    same = Neighbour(here, 2)
    freight(same)[0].send_ahead()
    assert same.asked == ["see"], "it has them"


def test_a_folder_behind_a_link_is_shared_too(here: Path, tmp_path: Path) -> None:
    (here / "runs").rename(tmp_path / "large-disk")
    (here / "runs").symlink_to(tmp_path / "large-disk")
    same = Neighbour(here)
    (place,) = freight(same)[0].stage_job_files(HOME.resolve(), "run")
    assert place.is_shared and Path(place.path) == here / HOME and same.asked == ["see"]


def test_another_host_gets_the_run_into_its_own_folder(here: Path, other: Neighbour) -> None:
    sender, told = freight(other)
    (place,) = sender.stage_job_files(HOME, "run")
    theirs = other.folder / HOME
    assert not place.is_shared and Path(place.path) == theirs
    mine, sent = read_plan(HOME / "plan.json"), read_plan(theirs / "plan.json")
    assert changed(sent, corpus=mine.job.corpus) == mine
    assert (theirs / "recipe.toml").read_text() == (HOME / "recipe.toml").read_text()
    corpus = open_corpus(Path(sent.job.corpus))
    corpus.verify()
    assert corpus.content_hash == open_corpus(Path(mine.job.corpus)).content_hash
    assert Path(sent.job.corpus).parent == other.folder / ".plait" / "received" / "data"
    assert (theirs / "logs").is_dir() and len(told) == 1 and "of prepared data to host-1" in told[0]


def test_a_folder_that_was_sent_is_not_trained_in(here: Path, other: Neighbour) -> None:
    refuse_joined_folder(RunFolder(HOME))
    freight(other)[0].stage_job_files(HOME, "run")
    with pytest.raises(PlaitError, match=r"was sent here by a host that leads this run .*; go on with it there, or"):
        refuse_joined_folder(RunFolder(other.folder / HOME))


def test_the_data_travel_once(here: Path, other: Neighbour) -> None:
    freight(other)[0].stage_job_files(HOME, "run")
    other.asked.clear()
    sender, told = freight(other)
    sender.stage_job_files(HOME, "run")
    assert "block" not in other.asked and not told


def test_the_checkpoint_to_go_on_from_travels_and_older_copies_go(here: Path, other: Neighbour) -> None:
    for step in (10, 20):
        checkpoint = HOME / "checkpoints" / f"step-{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "rank-00000.safetensors").write_bytes(b"weights %d" % step)
        (checkpoint / "manifest.json").write_text("{}")
        freight(other)[0].stage_job_files(HOME, "run", f"step-{step}")
    theirs = other.folder / HOME / "checkpoints"
    assert [path.name for path in theirs.iterdir()] == ["step-20"]
    assert file_entries_of(theirs / "step-20", final_name="manifest.json") == file_entries_of(
        checkpoint, final_name="manifest.json"
    )


def test_a_job_has_a_folder_for_its_time_and_its_results_come_back(here: Path, other: Neighbour) -> None:
    job = here / ".plait" / "proof"
    job.mkdir()
    (here / ".plait" / "data").rename(job / "data")
    corpus = next(path for path in (job / "data").iterdir() if path.is_dir()).rename(job / "corpus")
    write_plan(
        changed(read_plan(HOME / "plan.json"), corpus=str(corpus)),
        job / "plan.json",
    )
    (job / "recipe.toml").write_text((HOME / "recipe.toml").read_text())
    sender, told = freight(other)
    (place,) = sender.stage_job_files(job, "job")
    theirs = Path(place.path)
    assert theirs.is_relative_to(other.folder / ".plait")
    assert read_plan(theirs / "plan.json").job.corpus == str(theirs / "corpus") and not told
    open_corpus(theirs / "corpus").verify()
    (theirs / "rank-1.safetensors").write_bytes(b"result")
    sender.collect_job_files(job)
    assert (job / "rank-1.safetensors").read_bytes() == b"result" and not theirs.exists()


@pytest.mark.parametrize("leads_out", ["../evil", "absolute"])
def test_what_comes_back_stays_in_the_jobs_folder(here: Path, other: Neighbour, tmp_path: Path, leads_out: str) -> None:
    job = job_folder(here / ".plait" / "proof")
    name = str(tmp_path / "evil") if leads_out == "absolute" else leads_out
    sender = FileStager([Liar(other, name)], HOME, lambda line: None)
    sender.stage_job_files(job, "job")
    with pytest.raises(PlaitError, match="which plait never does"):
        sender.collect_job_files(job)
    assert not list(tmp_path.rglob("*evil*"))


def test_a_run_that_began_there_is_not_overwritten(here: Path, other: Neighbour) -> None:
    freight(other)[0].stage_job_files(HOME, "run")
    (other.folder / HOME / "joined.json").unlink()
    before = (other.folder / HOME / "plan.json").read_bytes()
    other.depot.close()
    again = Neighbour(other.folder)
    with pytest.raises(PlaitError, match=r"on this host holds a run of its own; move it away, or join from another"):
        freight(again)[0].stage_job_files(HOME, "run")
    assert (other.folder / HOME / "plan.json").read_bytes() == before
    assert again.depot.local_error is not None
    again.depot.close()


def test_a_folder_of_another_recipe_is_refused(here: Path, other: Neighbour) -> None:
    freight(other)[0].stage_job_files(HOME, "run")
    other.depot.close()
    recipe = HOME / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("width = 16", "width = 32"))
    again = Neighbour(other.folder)
    with pytest.raises(PlaitError, match=r"of another recipe \(model.width was 16 when .* is 32 now\); move it away"):
        freight(again)[0].stage_job_files(HOME, "run")
    again.depot.close()


def test_one_folder_serves_one_run_at_a_time(here: Path, other: Neighbour) -> None:
    freight(other)[0].stage_job_files(HOME, "run")
    second = Neighbour(other.folder, host=2)
    with pytest.raises(PlaitError, match=r"another host that joined a run works in .*, too; join from another folder"):
        freight(second)[0].stage_job_files(HOME, "run")
    second.depot.close()


def test_hosts_that_share_a_folder_without_host_0_do_not_spoil_each_others_data(
    here: Path, other: Neighbour, tmp_path: Path
) -> None:
    job, second = job_folder(tmp_path / "measure"), Neighbour(other.folder, host=2)
    sender, _ = freight(other)
    for _ in range(2):  # its own second job is no other host's
        sender.stage_job_files(job, "job")
        sender.collect_job_files(job)
    with pytest.raises(PlaitError, match=r"another host that joined a run works in .*, too; join from another folder"):
        freight(second)[0].stage_job_files(job, "job")
    assert second.depot.local_error is not None and "open" in second.asked and "take" not in second.asked
    other.depot.close()
    freight(second)[0].stage_job_files(job, "job")
    second.depot.close()


def test_many_hosts_may_work_in_the_folder_of_host_0(here: Path, tmp_path: Path) -> None:
    one, two = Neighbour(here), Neighbour(here, host=2)
    sender, told = freight(one, two)
    first, second = sender.stage_job_files(job_folder(tmp_path / "measure"), "job")
    assert first.path != second.path and not told
    assert one.asked.count("block") == two.asked.count("block") == 2, "the recipe and the plan travel alone"
    for neighbour in (one, two):
        neighbour.depot.close()


def test_a_disk_that_says_no_there_is_their_trouble(here: Path, other: Neighbour) -> None:
    (other.folder / "runs").write_text("a file where the folder should be")
    with pytest.raises(PlaitError, match="cannot be written"):
        freight(other)[0].stage_job_files(HOME, "run")
    assert other.depot.local_error is not None


@pytest.mark.parametrize("name", ["joined.json", "recipe.toml", "plan.json"])
def test_a_disk_that_takes_no_file_of_the_run_there_ends_before_it_begins(
    here: Path, other: Neighbour, name: str
) -> None:
    in_its_place = other.folder / HOME / name
    in_its_place.mkdir(parents=True)
    with pytest.raises(PlaitError, match=r"(could not|cannot) write .*; check the folder and the disk") as told:
        freight(other)[0].stage_job_files(HOME, "run")
    assert told.value.exit_code == 2
    assert other.depot.local_error is not None and other.depot.local_error.exit_code == 2
    assert [path.name for path in in_its_place.parent.iterdir() if path.name.endswith(".new")] == []


def test_of_a_run_that_never_came_whole_nothing_is_left(here: Path, other: Neighbour) -> None:
    asked = {"kind": "run", "name": "x", "recipe": (HOME / "recipe.toml").read_text()}
    other.attack("open", asked)
    put(other, "recipe.toml", b"half of it")
    assert (other.folder / HOME / "joined.json").exists()
    other.depot.close()
    assert not (other.folder / HOME).exists()
    again = Neighbour(other.folder)
    freight(again)[0].stage_job_files(HOME, "run")
    again.depot.close()
    assert (other.folder / HOME / "joined.json").exists() and RunFolder(other.folder / HOME).has_begun


def test_where_one_process_sent_tokens_is_sent_with_a_proof(here: Path, other: Neighbour) -> None:
    (HOME / ROUTING).write_bytes(b"routes")
    [place] = freight(other)[0].stage_job_files(HOME, "job")
    assert (Path(place.path) / ROUTING).read_bytes() == b"routes"


def test_of_a_job_that_failed_the_logs_stay_and_of_one_that_was_released_nothing(here: Path, other: Neighbour) -> None:
    asked = {"kind": "job", "name": "x", "recipe": (HOME / "recipe.toml").read_text()}
    folders = []
    for said in ("fine", "Traceback"):
        folders.append(Path(other.attack("open", asked).values.folder))
        put(other, "recipe.toml", b"")
        (folders[-1] / "corpus").mkdir()
        (folders[-1] / "corpus" / "index.json").write_text("{}")
        (folders[-1] / "rank-1.log").write_text(said)
        (folders[-1] / "rank-2.log").touch()
        if said == "fine":
            other.attack("release", {})
    other.depot.close()
    assert not folders[0].exists()
    assert [(path.name, path.read_text()) for path in folders[1].rglob("*")] == [("rank-1.log", "Traceback")]


def test_what_leads_out_of_the_folders_is_refused(here: Path, other: Neighbour) -> None:
    freight(other)[0].stage_job_files(HOME, "run")
    (other.folder / "private").write_text("secret")
    for values in ({"name": "../../private"}, {"name": "x", "staging": "../.."}):
        with pytest.raises(PlaitError):
            other.attack("read", {**values, "offset": 0, "bytes": 10})
    with pytest.raises(PlaitError):
        other.attack("take", {"root": "cache", "path": "../x", "files": []})
    assert (other.folder / "private").read_text() == "secret"


def test_before_a_folder_was_named_nothing_is_taken_or_given(other: Neighbour) -> None:
    for kind, values in (("read", {"name": "a"}), ("list", {}), ("block", {"name": "a"})):
        with pytest.raises(PlaitError, match="the host that leads"):
            other.attack(kind, {"offset": 0, "bytes": 1, **values})


def test_a_lost_host_is_told_while_another_is_still_served(here: Path, other: Neighbour, tmp_path: Path) -> None:
    """The first takes long; the second one's cable is pulled."""
    ended, served = threading.Event(), threading.Event()

    class Slow(Neighbour):
        def ask(self, request: RequestKind[Any, Any], question: Any, blob: bytes = b"") -> Reply[Any]:
            if request.name == "take":
                ended.wait(20)
                served.set()
            return super().ask(request, question, blob)

    class Lost(Neighbour):
        def ask(self, request: RequestKind[Any, Any], question: Any, blob: bytes = b"") -> Reply[Any]:
            if request.name == "take":
                raise RunFailed("host-2 was lost")
            return super().ask(request, question, blob)

    slow, lost = Slow(tmp_path / "slow"), Lost(tmp_path / "lost", host=2)
    sender, _ = freight(slow, lost)
    try:
        with pytest.raises(RunFailed, match="host-2 was lost"):
            sender.stage_job_files(HOME, "run")
        assert not served.is_set()
    finally:
        ended.set()


def test_a_small_file_that_is_larger_than_one_block_arrives_whole(here: Path, other: Neighbour) -> None:
    """A proof's routing is as large as its text is long; no request carries more than 1 MiB."""
    routes = bytes(range(256)) * 10_000
    (HOME / ROUTING).write_bytes(routes)
    [place] = freight(other)[0].stage_job_files(HOME, "job")
    assert (Path(place.path) / ROUTING).read_bytes() == routes
