"""A24: mixed failures about every twenty seconds, for as long as --minutes says."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from plait.commands.drilling.running_ranks import descendants
from tests.end_to_end.command import Place, ended
from tests.faults.conftest import Results

RECIPE = """
[data]
files = "play.txt"

[model]
layers = 4
width = 128
heads = 4
vocabulary = 300

[train]
sequence = 64
batch_tokens = 1024
matmul_backend = "default"

[layout]
replicate = 4

[checkpoint]
every = "2 s"

[report]
evaluate = "2000 steps"
"""
USEFUL = 0.85
GROWTH, ROOM_BYTES, ROOM_FILES = 1.05, 4 << 20, 4
LOOK_EVERY_S = 1.0


def test_a24_mixed_failures_for_minutes(
    results: Results, seed: int, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    minutes = pytestconfig.getoption("--minutes")
    place, temporary = Place(tmp_path / "soak", RECIPE), tmp_path / "temporary"
    temporary.mkdir()
    words = ("drill", "tiny.toml", "run.name=soak", "--random", f"{minutes:g}min", "--seed", f"{seed}")
    process = place.start(*words, "--json", "drill.json", environment={"TMPDIR": str(temporary)})
    looks: list[tuple[int, int]] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_EVERY_S):
            if place.path("soak-drill").exists():
                looks.append((resident_bytes(process.pid), open_files(process.pid)))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    last = ended(process, within_s=minutes * 60 * 4 + 120)
    over.set()
    watcher.join()
    report = json.loads((place.folder / "drill.json").read_text())
    fifth = len(looks) // 5
    early, late = looks[fifth : 2 * fifth], looks[-fifth:-1]
    memory = [median(one for one, _ in part) for part in (early, late)]
    files = [median(one for _, one in part) for part in (early, late)]
    results["A24"] = {
        "minutes": minutes,
        "faults": dict(Counter(fault["kind"] for fault in report["faults"])),
        "survived": sum(fault["back_after_s"] is not None for fault in report["faults"]),
        "final_equal": report["final_equal"],
        "samples_lost": report["samples_lost"],
        "samples_repeated": report["samples_repeated"],
        "useful_share": report["useful_share"],
        "resident MiB, early and late": [one / 2**20 for one in memory],
        "open files, early and late": files,
        "left behind": sorted(path.name for path in temporary.rglob("*")),
        "every fault": report["faults"],
    }
    print(json.dumps({key: value for key, value in results["A24"].items() if key != "every fault"}, indent=2))
    assert last.code == 0 and report["ok"] and report["final_equal"] == "bits", last
    assert memory[1] <= GROWTH * memory[0] + ROOM_BYTES and files[1] <= files[0] + ROOM_FILES
    left = [path for path in temporary.rglob("*") if path.name != f"plait-{os.getuid()}"]
    assert not left, "but for the folder that names the runs of a machine, and is empty"
    place.assert_nobody_left()
    assert report["useful_share"] >= USEFUL


def resident_bytes(pid: int) -> int:
    """Of the command and the process that starts its workers: those that live on through all failures."""
    return sum(_resident(one) for one in lasting(pid))


def open_files(pid: int) -> int:
    return sum(len(_names(Path(f"/proc/{one}/fd"))) for one in lasting(pid))


def lasting(pid: int) -> Iterator[int]:
    yield pid
    for below in descendants(pid):
        try:
            if b"forkserver" in Path(f"/proc/{below}/cmdline").read_bytes() and _parent(below) == pid:
                yield below
        except OSError:
            continue


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _names(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
