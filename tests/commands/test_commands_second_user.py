"""Two users of one machine: what one makes first the other does not fill with text, and nobody reads what plait wrote.

The commands run as users of their own, so these tests need root.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest

from tests.matrix import few_fast

ROOT = Path(__file__).parents[2]
VICTIM, MALLORY, GROUP = 4343, 4242, 4444
RECIPE = """
[data]
files = "play.txt"
tokenizer = "gpt2"
[model]
layers = 1
width = 16
heads = 1
[train]
sequence = 16
batch_tokens = 64
budget = "1 steps"
"""


def _as_user(
    uid: int, *command: str, folder: Path, groups: tuple[int, ...] = (), umask: int = 0o022
) -> subprocess.CompletedProcess[str]:
    shared = ("--groups", ",".join(map(str, groups))) if groups else ("--clear-groups",)
    return subprocess.run(
        ["setpriv", "--reuid", str(uid), "--regid", str(uid), *shared, *command],
        cwd=folder,
        umask=umask,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def _can_be_others() -> bool:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        return False
    return _as_user(VICTIM, sys.executable, "-c", "import plait", folder=Path("/")).returncode == 0


pytestmark = pytest.mark.skipif(not _can_be_others(), reason="only root can start commands of other users")
MAKE = "import sys; from pathlib import Path; from plait.private_folder import make_private_folder as make; "
MAKE += "from plait.process_exit import exit_with_sentence; exit_with_sentence(lambda: make(Path(sys.argv[1])) or 0)"


def plait(uid: int, folder: Path, *arguments: str, umask: int = 0o022) -> subprocess.CompletedProcess[str]:
    return _as_user(uid, sys.executable, "-m", "plait", *arguments, folder=folder, umask=umask)


def make(uid: int, folder: Path, path: str, groups: tuple[int, ...] = ()) -> subprocess.CompletedProcess[str]:
    return _as_user(uid, sys.executable, "-c", MAKE, path, folder=folder, groups=groups)


def owned(path: Path, uid: int, mode: int, gid: int | None = None) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    os.chown(path, uid, uid if gid is None else gid)
    path.chmod(mode)
    return path


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder in /tmp that belongs to the victim, with a text and a recipe; pytest's own folders are closed."""
    folder = Path(mkdtemp(prefix="plait-two-users-"))
    (folder / "play.txt").write_text("the king is here, and so is the queen.\n" * 400)
    (folder / "tiny.toml").write_text(RECIPE)
    owned(folder, VICTIM, 0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("made_first", few_fast([".plait", ".plait/data", "runs", "runs/x"], "runs/x"))
def test_nothing_is_written_into_a_folder_that_another_user_made_first(place: Path, made_first: str) -> None:
    place.chmod(0o777)
    theirs = place / made_first
    for each in reversed(theirs.relative_to(place).parents[:-1]):
        owned(place / each, VICTIM, 0o777)
    owned(theirs, MALLORY, 0o777)
    told = plait(VICTIM, place, "train", "tiny.toml", "run.name=x")
    assert told.returncode == 2 and told.stderr.count("\n") == 1, told
    assert f"{theirs} belongs to another user (number {MALLORY})" in told.stderr
    assert not list(theirs.iterdir())


@pytest.mark.parametrize("target", ["mallory's", "victim's"])
def test_a_link_of_another_user_leads_nowhere(place: Path, target: str) -> None:
    place.chmod(0o777)
    elsewhere = owned(place / "elsewhere", MALLORY if target == "mallory's" else VICTIM, 0o777)
    (place / "runs").symlink_to(elsewhere)
    os.lchown(place / "runs", VICTIM if target == "mallory's" else MALLORY, VICTIM)
    told = make(VICTIM, place, "runs/x")
    assert told.returncode == 2 and f"belongs to another user (number {MALLORY})" in told.stderr, told
    os.lchown(place / "runs", VICTIM, VICTIM)
    os.chown(elsewhere, VICTIM, VICTIM)
    assert make(VICTIM, place, "runs/x").returncode == 0, "an own link to an own disk"


@pytest.mark.parametrize("umask", few_fast([0o000, 0o022, 0o077], 0o000))
def test_what_is_prepared_is_private_whatever_the_umask(place: Path, umask: int) -> None:
    told = plait(VICTIM, place, "data", "tiny.toml", umask=umask)
    assert told.returncode == 0 and "warning" not in told.stdout, told
    made = [place / ".plait", *(place / ".plait").rglob("*")]
    (corpus,) = (path.parent for path in made if path.name == "index.json")
    assert {stat.S_IMODE(path.stat().st_mode) for path in (place / ".plait", corpus.parent, corpus)} == {0o700}
    assert not any(stat.S_IMODE(path.stat().st_mode) & stat.S_IWOTH for path in made)
    read = _as_user(MALLORY, "cat", str(corpus / "train-00000.bin"), folder=place)
    assert read.returncode != 0 and "Permission denied" in read.stderr


def test_an_own_folder_that_is_open_to_all_is_said_and_its_data_are_closed(place: Path) -> None:
    for name in (".plait", ".plait/data", "runs"):
        owned(place / name, VICTIM, 0o777)
    told = plait(VICTIM, place, "data", "tiny.toml", umask=0)
    assert told.returncode == 0, told
    assert told.stdout.count("can be changed by every user of this machine") == 3
    (index,) = (place / ".plait" / "data").glob("*/index.json")
    files = [*index.parent.iterdir(), place / ".plait" / "data" / "hashes.json"]
    for path in files:
        assert _as_user(MALLORY, "cat", str(path), folder=place).returncode != 0, path


def test_a_group_shares_the_folders_that_one_of_it_made(place: Path) -> None:
    shared = owned(place / "project", 0, 0o2770, GROUP)
    owned(shared / "runs", MALLORY, 0o2770, GROUP)
    assert make(VICTIM, shared, "runs/x", groups=(GROUP,)).returncode == 0
    assert stat.S_IMODE((shared / "runs" / "x").stat().st_mode) & 0o777 == 0o700
    shared.chmod(0o2777)  # now anybody may have made it
    assert make(VICTIM, shared, "runs/y", groups=(GROUP,)).returncode == 2
    shared.chmod(0o2770)
    (shared / "runs").chmod(0o2777)
    assert make(VICTIM, shared, "runs/y", groups=(GROUP,)).returncode == 2


def test_root_works_in_a_users_folder_and_the_user_beside_what_root_made(place: Path) -> None:
    owned(place / "runs", VICTIM, 0o700)
    assert make(0, place, "runs/of-root").returncode == 0
    owned(place / ".plait", 0, 0o755)
    assert make(VICTIM, place, ".plait").returncode == 0
    owned(place / ".plait", MALLORY, 0o755)
    assert make(0, place, ".plait/data").returncode == 2, "neither root's nor the user's"
    sticky = owned(place / "tmp", 0, 0o1777)
    owned(sticky / "mine", VICTIM, 0o755)
    assert make(VICTIM, sticky / "mine", "runs/x").returncode == 0
