"""plait in a real Jupyter kernel: a bar in one output, the interrupt button, and nobody left."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty
from time import monotonic
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

from tests.end_to_end.command import MARK, Place, wait_until

TRAIN = 'receipt = plait.train("tiny.toml", ["run.name={name}", "train.budget={steps} steps", "layout.replicate=2"])'


class Kernel:
    """A kernel whose current folder is a place with a recipe; `run` gives the messages of a cell."""

    def __init__(self, place: Place) -> None:
        self._manager = KernelManager(kernel_name="python3")
        mark = {MARK: place._mark, "PYTHONPATH": str(Path(__file__).parents[2])}
        self._manager.start_kernel(cwd=str(place.folder), env={**os.environ, **mark})
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)
        self.run("import plait")

    def run(self, code: str, while_it_runs: Callable[[], bool] = lambda: True) -> list[dict[str, Any]]:
        """Run a cell to its end; `while_it_runs` is called again and again until it answers True."""
        request, messages = self._client.execute(code), list[dict[str, Any]]()
        is_done, deadline = False, monotonic() + 200
        while True:
            assert monotonic() < deadline, messages[-3:]
            is_done = is_done or while_it_runs()
            try:
                message = self._client.get_iopub_msg(timeout=0.05)
            except Empty:
                continue
            if message["parent_header"].get("msg_id") != request:
                continue
            messages.append(message)
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return messages

    def interrupt(self) -> None:
        self._manager.interrupt_kernel()

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(place: Place) -> Iterator[Kernel]:
    one = Kernel(place)
    yield one
    one.close()


def error_of(messages: list[dict[str, Any]]) -> tuple[str, list[str]]:
    found = [one["content"] for one in messages if one["msg_type"] == "error"]
    assert len(found) == 1, messages
    return found[0]["ename"], found[0]["traceback"]


def workers_of(place: Place, kernel: Kernel) -> list[int]:
    """The processes of the place but the kernel itself."""
    return [pid for pid in place.processes() if pid != kernel._manager.provisioner.pid]  # type: ignore[union-attr]


def begun(place: Place, name: str, steps: int) -> Callable[[], bool]:
    return lambda: (place.path(name) / "metrics.jsonl").exists() and len(place.lines(name)) > steps


@pytest.mark.slow
def test_a_cell_trains_two_workers_with_one_output_that_changes(place: Place, kernel: Kernel) -> None:
    messages = kernel.run(TRAIN.format(name="cell", steps=20) + "; print(receipt.steps, receipt.world_size)")
    kinds = [one["msg_type"] for one in messages]
    assert kinds.count("display_data") == 1 and kinds.count("update_display_data") >= 2 and "error" not in kinds
    assert [one["content"]["text"] for one in messages if one["msg_type"] == "stream"] == ["20 2\n"]
    assert workers_of(place, kernel) == []


@pytest.mark.slow
def test_the_interrupt_button_saves_and_leaves_nobody(place: Place, kernel: Kernel) -> None:
    is_begun = begun(place, "button", 12)

    def press() -> bool:
        if is_begun():
            kernel.interrupt()
            return True
        return False

    name, shown = error_of(kernel.run(TRAIN.format(name="button", steps=200), press))
    assert name == "Interrupted" and len(shown) == 1, shown
    assert shown[0].startswith("plait: stopped after step ") and "saved; the same call goes on" in shown[0]
    wait_until(lambda: workers_of(place, kernel) == [], within_s=5)
    saved = place.checkpoints("button")[-1]
    assert saved > 12 and f"step {saved} of" in shown[0]
    messages = kernel.run(TRAIN.format(name="button", steps=200) + "; print(receipt.steps)")
    assert [one["content"]["text"] for one in messages if one["msg_type"] == "stream"] == ["200\n"]


@pytest.mark.slow
def test_a_second_interrupt_while_it_saves_ends_it_at_once_with_one_sentence(place: Place, kernel: Kernel) -> None:
    is_begun, pressed = begun(place, "twice", 12), list[float]()

    def press_twice() -> bool:
        if not pressed and is_begun():
            ranks = [place.rank_process("twice", rank) for rank in (0, 1)]
            for pid in ranks:
                os.kill(pid, signal.SIGSTOP)  # they cannot save
            kernel.interrupt()
            pressed.append(monotonic())
        elif pressed and monotonic() - pressed[0] > 1.5:
            kernel.interrupt()
            return True
        return False

    name, shown = error_of(kernel.run(TRAIN.format(name="twice", steps=4000), press_twice))
    assert name == "RunFailed" and shown[0].startswith("plait: stopped at once by a second SIGINT"), shown
    wait_until(lambda: workers_of(place, kernel) == [], within_s=5)
    assert place.checkpoints("twice")[-1] % 10 == 0


def test_errors_are_one_sentence(kernel: Kernel) -> None:
    name, shown = error_of(kernel.run('plait.train("nothing.toml")'))
    assert name == "PlaitError" and len(shown) == 1
    assert shown[0].startswith('plait: there is no recipe "nothing.toml"')


@pytest.mark.slow
def test_the_example_notebook_runs(tmp_path: Path) -> None:
    recipes = Path(__file__).parents[2] / "recipes"
    for file in ("notebook.ipynb", "01-shakespeare.toml", "shakespeare.txt"):
        shutil.copy(recipes / file, tmp_path)
    book = nbformat.read(tmp_path / "notebook.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in book.cells), "the notebook is kept without what it printed"
    done = NotebookClient(book, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = "".join(str(cell.get("outputs", "")) for cell in done.cells)
    assert "the whole plan" in shown and "KING HENRY." in shown and "Traceback" not in shown
