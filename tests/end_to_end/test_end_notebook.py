"""plait in a real Jupyter kernel: a bar in one output, the interrupt button, and nobody left."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

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
        request, messages, is_done, deadline = self._client.execute(code), list[dict[str, Any]](), False, monotonic() + 200
        while True:
            assert monotonic() < deadline, messages[-3:]
            is_done = is_done or while_it_runs()
            try:
                message = self._client.get_iopub_msg(timeout=0.05)
            except Exception:  # queue.Empty
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


def test_a_cell_trains_two_workers_with_one_output_that_changes(place: Place, kernel: Kernel) -> None:
    messages = kernel.run(TRAIN.format(name="cell", steps=20) + "; print(receipt.steps, receipt.world_size)")
    kinds = [one["msg_type"] for one in messages]
    assert kinds.count("display_data") == 1 and kinds.count("update_display_data") >= 2 and "error" not in kinds
    assert [one["content"]["text"] for one in messages if one["msg_type"] == "stream"] == ["20 2\n"]
    assert workers_of(place, kernel) == []


def test_the_interrupt_button_saves_and_leaves_nobody(place: Place, kernel: Kernel) -> None:
    is_begun = begun(place, "button", 12)

    def press() -> bool:
        if is_begun():
            kernel.interrupt()
            return True
        return False

    name, shown = error_of(kernel.run(TRAIN.format(name="button", steps=4000), press))
    assert name == "Interrupted" and len(shown) == 1, shown
    assert shown[0].startswith("plait: stopped after step ") and "saved; the same command goes on" in shown[0]
    wait_until(lambda: workers_of(place, kernel) == [], within_s=5)
    saved = place.checkpoints("button")[-1]
    assert saved > 12 and f"step {saved} of" in shown[0]
    messages = kernel.run(TRAIN.format(name="button", steps=saved + 5) + "; print(receipt.steps)")
    assert [one["content"]["text"] for one in messages if one["msg_type"] == "stream"] == [f"{saved + 5}\n"]


def test_a_second_interrupt_while_it_saves_ends_it_at_once_with_one_sentence(place: Place, kernel: Kernel) -> None:
    is_begun, pressed = begun(place, "twice", 12), list[float]()

    def press_twice() -> bool:
        if not pressed and is_begun():
            ranks = [place.rank_process("twice", rank) for rank in (0, 1)]
            for pid in ranks:
                os.kill(pid, 19)  # SIGSTOP: they cannot save
            kernel.interrupt()
            pressed.append(monotonic())
        elif pressed and monotonic() - pressed[0] > 1.5:
            kernel.interrupt()
            return True
        return False

    name, shown = error_of(kernel.run(TRAIN.format(name="twice", steps=4000), press_twice))
    assert name == "RunFailed" and shown[0].startswith("plait: stopped at once by a second SIGINT"), shown
    wait_until(lambda: workers_of(place, kernel) == [], within_s=5)
    assert place.checkpoints("twice")[-1] == 10


def test_errors_are_one_sentence(kernel: Kernel) -> None:
    name, shown = error_of(kernel.run('plait.train("nothing.toml")'))
    assert name == "PlaitError" and shown == ['plait: there is no recipe "nothing.toml"; give the path of a .toml file']
