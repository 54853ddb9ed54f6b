"""What a folder that hosts share is mounted as, what that means for a run, and a disk without locks."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from plait.errors import PlaitError
from plait.hosts.shared_folder import Mount, has_nonce, mount_of, shared_folder_lines, write_nonce
from plait.run_folder import hold_lock

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro
40 22 0:35 / /home rw,relatime shared:20 - nfs4 nas:/home rw,vers=4.2,hard,local_lock=none,addr=10.0.0.9
41 40 0:36 / /home/my\\040work rw - nfs nas:/w rw,vers=3,soft,nolock,local_lock=all
42 22 0:37 / /scratch rw - lustre mds@tcp:/scratch rw,flock
garbled
"""


@pytest.mark.parametrize(
    ("folder", "kind", "option"),
    [
        ("/home/ann/runs", "nfs4", "hard"),
        ("/home/my work/runs", "nfs", "soft"),
        ("/scratch/x", "lustre", "flock"),
        ("/homely", "ext4", "relatime"),
    ],
)
def test_a_folder_is_on_the_nearest_mount(folder: str, kind: str, option: str) -> None:
    found = mount_of(Path(folder), MOUNTS)
    assert found.kind == kind and option in found.options


def test_this_machine_has_a_mount_for_each_folder(tmp_path: Path) -> None:
    assert mount_of(tmp_path, Path("/proc/self/mountinfo").read_text()).kind


def test_what_sharing_means_is_said() -> None:
    nfs = mount_of(Path("/home/my work"), MOUNTS)
    shared, apart, locks, soft = shared_folder_lines(["b", "c"], ["d"], "runs/x", nfs)
    assert shared.startswith(
        "folder   runs/x (nfs) is also that of b and c, which saw a file that was just written here:"
    )
    assert apart == (
        "folder   d shares no folder with this host: data are sent once, and parts of checkpoints come back"
    )
    assert "start this run from one host" in locks and "earlier checkpoints stay whole" in soft
    plain = Mount(kind="ext4", options=frozenset({"rw"}))
    many = [f"host-{number}" for number in range(1, 20)]
    [line] = shared_folder_lines([], many, "runs/x", plain)
    assert "host-8 and 11 more share no folder" in line


def test_a_nonce_is_found_by_listing_its_folder(tmp_path: Path) -> None:
    with write_nonce(tmp_path) as (name, content):
        assert has_nonce(tmp_path, name, content)
        assert not has_nonce(tmp_path, name, "0" * 32)
        assert not has_nonce(tmp_path / "elsewhere", name, content)
    assert not has_nonce(tmp_path, name, content)


def test_two_hosts_that_look_at_the_same_moment_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One took away what the other had just written to see whether it may, which then said that it cannot write."""
    write, looks = Path.write_bytes, list[bool]()

    with write_nonce(tmp_path) as (name, content):

        def look_once_more(path: Path, data: bytes) -> int:
            written = write(path, data)
            if not looks:
                looks.append(True)
                looks.append(has_nonce(tmp_path, name, content))
            return written

        monkeypatch.setattr(Path, "write_bytes", look_once_more)
        assert has_nonce(tmp_path, name, content) and looks == [True, True]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("code", "says"), [(errno.ENOLCK, "has no locks"), (errno.ENOSYS, "has no locks"), (errno.EWOULDBLOCK, "taken")]
)
def test_a_disk_without_locks_is_not_called_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, says: str
) -> None:
    def refuse(file: object, how: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (tmp_path / ".lock").open("a") as lock, pytest.raises(PlaitError, match=says):
        hold_lock(lock, "it is taken")
