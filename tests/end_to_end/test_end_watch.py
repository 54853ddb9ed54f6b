"""`plait watch` and `plait train --page` as a person uses them: the page follows a real run of two workers."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.end_to_end.command import STEPS, Place, ended, kill_group, wait_until

ADDRESS = re.compile(r"(http://127\.0\.0\.1:\d+)/\?token=([\w-]+)")


class Page:
    """The page that a command serves, by the line that it printed; what it prints after that is read as well."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.first_line = process.stdout.readline()
        found = ADDRESS.search(self.first_line)
        assert found, self.first_line or process.communicate()
        self.root, self.token = found.groups()

    def ask(self, path: str) -> Any:
        request = Request(f"{self.root}/{path}", headers={"Authorization": f"Bearer {self.token}"})
        with urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def has(self, name: str) -> bool:
        try:
            return self.ask(f"api/runs/{name}")["step"] > 0
        except HTTPError:
            return False


def test_the_page_of_a_run_that_trains_follows_it_to_its_end(place: Place) -> None:
    name = "with-page"
    process = place.start("train", "tiny.toml", f"run.name={name}", "--page", "--no-check")
    page = Page(process)
    assert page.first_line.startswith("page     http://127.0.0.1:")
    with pytest.raises(HTTPError, match="404"):
        page.ask(f"api/runs/{name}-other")
    wait_until(lambda: page.has(name) or process.poll() is not None, within_s=90)
    seen, after, state = [], 0, ""
    while process.poll() is None and after < STEPS:
        try:
            view = page.ask(f"api/runs/{name}?after={after}")
        except OSError:
            break  # it ended
        assert view["metrics"]["after"] in (after, 0)
        seen += view["metrics"]["rows"]
        after, state = view["step"], state or view["state"]
    end = ended(process)
    assert end.code == 0 and not end.err and end.out.count("http") == 0, end
    assert state == "training" and after > 0
    columns = view["metrics"]["columns"]
    written = [line for line in place.lines(name) if "loss" in line]
    for row, line in zip(seen, written, strict=False):
        told = dict(zip(columns, row, strict=True))
        assert all(told[key] == line[key] for key in ("loss", "grad_norm", "lr", "step_s", "tokens_per_s", "tokens"))
    lines = [json.loads(line) for line in (place.path(name) / "rank-times.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == STEPS, "the last steps are in it"
    assert all(len(line["compute_s"]) == 2 and min(line["compute_s"]) > 0 for line in lines)
    place.assert_nobody_left()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_watch_shows_finished_runs_and_ends_by_a_signal(
    place: Place, reference: Any, number: signal.Signals, code: int
) -> None:
    name = reference(2)
    process = place.start("watch", name, "--no-browser")
    page = Page(process)
    [row] = [row for row in page.ask("api/runs") if row["name"] == name]
    assert (row["state"], row["step"], row["steps"]) == ("finished", STEPS, STEPS) and row["tokens_per_s"] > 0
    view = page.ask(f"api/runs/{name}")
    assert view["step"] == STEPS and view["receipt"]["wall_s"] > 0 and len(view["memory"]["tensor_bytes"]) == 2
    kill_group(process, number)
    end = ended(process, within_s=20)
    assert end.code == code and not end.err and "Traceback" not in end.out


def test_what_is_wrong_is_a_sentence(place: Place, reference: Any) -> None:
    name = reference(2)
    assert f'there is no run "{name}x"' in place.run("watch", f"{name}x").sentence()
    process = place.start("watch", "--no-browser")
    port = Page(process).root.rpartition(":")[2]
    taken = place.run("watch", "--port", port)
    assert taken.code == 2 and f"port {port} cannot be used" in taken.sentence()
    taken = place.run(
        "train",
        "tiny.toml",
        "--page",
        environment={"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
    )
    assert taken.code == 2 and "plait watch" in taken.sentence()
    kill_group(process, signal.SIGINT)
    assert ended(process).code == 0
