"""`plait submit --on ssh` to three machines with an sshd, an address and a home of their own. Run by hand, as root:

.venv/bin/python -m pytest tests/ssh/real_ssh.py

PLAIT_WHEELHOUSE names a folder with the wheels of all that plait needs (python -m pip download --dest FOLDER plait's
lock file); without it nothing can be installed on a machine that has no way to the internet, and that test is left out.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from plait.clusters.ssh import environment_files
from tests.end_to_end.command import RECIPE, Ended, Place, ended, wait_until
from tests.ssh.machines import ADDRESSES, SSHD, Machines

STEPS = 100
LONGER = RECIPE.replace('budget = "60 steps"', f'budget = "{STEPS} steps"')
EVEN = ("layout.shares=[4, 3]", 'balance.every="never"', "run.threads=1")
ROOT = Path(__file__).parents[2]
WHEELHOUSE = os.environ.get("PLAIT_WHEELHOUSE", "")

pytestmark = pytest.mark.skipif(
    not Path(SSHD).exists() or shutil.which("ssh") is None or os.geteuid() != 0, reason="needs root and openssh-server"
)


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with Machines(tmp_path_factory.mktemp("machines") / "all") as made:
        yield made


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The laptop that submits."""
    return Place(tmp_path_factory.mktemp("laptop"), LONGER)


def submit(place: Place, machines: Machines, name: str, *more: str, names: str = "ann,bob") -> subprocess.Popen[str]:
    words = ("submit", "tiny.toml", f"run.name={name}", *EVEN, "--on", "ssh", "--machines", names)
    python = ("--with", f"python={sys.executable}")
    return place.start(*words, *python, *more, environment=environment(machines))


def environment(machines: Machines) -> dict[str, str]:
    return {"PATH": machines.path}


def type_(place: Place, machines: Machines, *words: str, within_s: float = 400) -> Ended:
    return place.run(*words, environment=environment(machines), within_s=within_s)


def test_two_machines_train_and_their_files_come_back(place: Place, machines: Machines) -> None:
    told = ended(submit(place, machines, "two"), within_s=400)
    assert told.code == 0 and "started  node 1: bob" in told.out and "saved    runs/two" in told.out, told
    assert (machines.home("ann") / "plait-runs" / "runs" / "two" / "receipt.json").exists()
    assert not (machines.home("bob") / "plait-runs" / "play.txt").exists()  # node 0 sends what the others need
    fetched = type_(place, machines, "fetch", "two")
    assert fetched.code == 0 and place.checkpoints("two")[-1] == STEPS, fetched
    alone = place.train("here", *EVEN)
    assert alone.code == 0 and place.sums("here") == place.sums("two"), alone
    assert place.manifest("here", STEPS) == place.manifest("two", STEPS)
    assert place.numbers("here") == place.numbers("two")


def test_it_goes_on_when_the_laptop_sleeps(place: Place, machines: Machines) -> None:
    following = submit(place, machines, "asleep")
    run = machines.home("ann") / "plait-runs" / "runs" / "asleep"
    wait_until((run / "metrics.jsonl").exists, within_s=300)
    assert_secret_is_nowhere(machines, place)
    following.kill()
    ended(following)
    wait_until((run / "receipt.json").exists, within_s=300)
    assert type_(place, machines, "fetch", "asleep").code == 0
    assert place.numbers("asleep") == place.numbers("two")


def test_a_run_is_not_started_twice_and_ends_saved_by_its_name(place: Place, machines: Machines) -> None:
    long = ("train.budget=100000 steps", "checkpoint.every=50 steps", "report.evaluate=never")
    following = submit(place, machines, "long", *long)
    run = machines.home("ann") / "plait-runs" / "runs" / "long"
    wait_until(lambda: bool(list(run.glob("checkpoints/step-*"))), within_s=300)
    again = ended(submit(place, machines, "long", *long), within_s=400)
    assert again.code == 2 and "plait stop long" in again.sentence()
    assert "ann running, bob running" in type_(place, machines, "status", "long").out
    fetched = type_(place, machines, "fetch", "long")
    assert fetched.code == 0 and "it is not finished: plait status long" in fetched.out, fetched
    assert type_(place, machines, "stop", "long").code == 0
    told = ended(following, within_s=300)
    assert told.code == 1 and "saved" in told.out and "submit again" in told.err, told
    wait_until(lambda: "running" not in type_(place, machines, "status", "long").out, within_s=100)


def assert_secret_is_nowhere(machines: Machines, place: Place) -> None:
    """While a run goes on: in no file, and in no program's arguments; only who may read a program's memory finds it."""
    [agent, *_] = [pid for pid in running_in(machines.home("ann")) if b"PLAIT_SECRET=" in variables_of(pid)]
    secret = variables_of(agent).split(b"PLAIT_SECRET=")[1].split(b"\0")[0]
    assert len(secret) > 20
    for path in (*machines.folder.rglob("*"), *place.folder.rglob("*")):
        assert not path.is_file() or secret not in path.read_bytes(), path
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            assert secret not in entry.read_bytes(), entry


def variables_of(pid: int) -> bytes:
    """A program's variables as it was started with."""
    return Path(f"/proc/{pid}/environ").read_bytes()


def running_in(folder: Path) -> list[int]:
    """All processes that work in a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if Path(os.readlink(entry / "cwd")).is_relative_to(folder):  # noqa: PTH115  Path.resolve would follow
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.parametrize(
    ("names", "more", "says"),
    [
        ("ann,nobody", (), "no such name is known here"),
        ("ann,cy", ("--with", "python=/nowhere/python"), "ann has no /nowhere/python"),
        ("ann,cy", ("--with", "folder=/proc/plait"), "that folder cannot be written"),
    ],
)
def test_what_a_machine_lacks_is_one_sentence(
    names: str, more: tuple[str, ...], says: str, place: Place, machines: Machines
) -> None:
    words = ("submit", "tiny.toml", "run.name=no", *EVEN, "--on", "ssh", "--machines", names, *more)
    told = type_(
        place, machines, *words, *(() if "python" in " ".join(more) else ("--with", f"python={sys.executable}"))
    )
    assert told.code == 2 and says in told.sentence(), told


def test_a_machine_that_loses_its_power_costs_no_bit_once_it_is_back(place: Place, machines: Machines) -> None:
    """All that ran on it is gone; the others end with its name, and the same command goes on."""
    following = submit(place, machines, "cut")
    run = machines.home("ann") / "plait-runs" / "runs" / "cut"
    wait_until(lambda: bool(list(run.glob("checkpoints/step-*"))), within_s=300)
    machines.kill("bob")
    told = ended(following, within_s=120)
    assert told.code == 1 and f"({ADDRESSES['bob']}) was lost" in told.out and "submit again" in told.err, told
    gone = ended(submit(place, machines, "cut"), within_s=100)
    assert gone.code == 2 and "bob" in gone.sentence(), gone
    machines.start("bob")
    again = ended(submit(place, machines, "cut"), within_s=400)
    assert again.code == 0 and "resume   from step-" in again.out, again
    assert type_(place, machines, "fetch", "cut").code == 0
    assert place.numbers("cut") == place.numbers("two")
    assert place.manifest("cut", STEPS) == place.manifest("two", STEPS)


@pytest.mark.skipif(not WHEELHOUSE, reason="PLAIT_WHEELHOUSE is not set")
def test_a_machine_without_plait_gets_it_once_and_trains_to_the_end(
    place: Place, machines: Machines, tmp_path: Path
) -> None:
    wheels = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run([sys.executable, *wheels], check=True)
    [wheel] = tmp_path.glob("plait-*.whl")
    pip = machines.home("cy") / ".config" / "pip" / "pip.conf"
    pip.parent.mkdir(parents=True)
    pip.write_text(f"[global]\nno-index = true\nfind-links = {WHEELHOUSE}\n")
    words = ("submit", "tiny.toml", "run.name=fresh", "layout.replicate=1", "--on", "ssh", "--with", f"wheel={wheel}")
    told = type_(place, machines, *words, "--machines", "cy", within_s=1800)
    assert told.code == 0 and "installing plait, once" in told.out, told
    assert (machines.home("cy") / "plait-runs" / "runs" / "fresh" / "receipt.json").exists()
    own = Path(".plait") / "environments" / environment_files(str(wheel)).name
    assert (machines.home("cy") / own / "ready").exists()
    for name in ("ann", "bob"):  # they have it already
        (machines.home(name) / own.parent).mkdir(parents=True, exist_ok=True)
        (machines.home(name) / own).symlink_to(machines.home("cy") / own)
    three = ("run.name=three", "layout.replicate=3", "layout.shares=[3, 2, 2]", 'balance.every="never"')
    told = type_(place, machines, *words[:2], *three, *words[4:], "--machines", "ann,bob,cy")
    assert told.code == 0 and told.out.count("plait is there") == 3, told


def test_a_machine_that_was_installed_anew_is_not_believed_until_a_person_says_so(
    place: Place, machines: Machines
) -> None:
    machines.install_anew("bob")
    told = ended(submit(place, machines, "changed"), within_s=60)
    assert told.code == 2 and "ssh-keygen -R" in told.sentence()
    machines.known(again=True)
    assert ended(submit(place, machines, "changed"), within_s=400).code == 0
