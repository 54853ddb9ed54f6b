"""The live page in a real browser: what it shows is in the run's files, live, for everybody, and from nowhere else.

`make test-browser` brings Debian's Chromium, Playwright and axe-core.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from plait.page.serve import page_server
from plait.report.incidents import StartLine, append_start
from plait.report.shares_file import SharesLine, append_shares
from plait.run_folder import RunFolder, lock_run_folder
from plait.working_folder import WorkingFolder
from tests.end_to_end.command import Place, ended, kill_group
from tests.end_to_end.test_end_watch import ADDRESS
from tests.report.test_report_metrics import step_report
from tests.run_files.written_runs import incident_of, write_rank_times, written_run

sync_api = pytest.importorskip("playwright.sync_api", reason="make test-browser brings it")
pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
AXE = ROOT / ".browser" / "package" / "axe.min.js"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PICTURES = ROOT / "docs" / "pictures"
STEPS = 3000
DESKTOP = {"viewport": {"width": 1280, "height": 860}}
VIEWS = {
    "light": DESKTOP | {"color_scheme": "light"},
    "dark": DESKTOP | {"color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True, "color_scheme": "light"},
}


@dataclass(slots=True)
class Tab:
    """A page in the browser, with all that it asked for and complained of."""

    page: Any
    asked: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def open(self, url: str) -> None:
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda said: said.type in ("error", "warning") and self.complaints.append(said.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(url)

    def until(self, fact: str, within_s: float = 60) -> None:
        """Wait until an expression is true; Playwright's own wait compiles it in the page, which the policy forbids."""
        deadline = time.monotonic() + within_s
        while not self.page.evaluate(fact):
            assert time.monotonic() < deadline, f"not within {within_s} s: {fact}"
            self.page.wait_for_timeout(50)

    def assert_clean(self, url: str) -> None:
        """Nothing was asked of anybody else, and nothing went wrong."""
        root = url.partition("?")[0]
        assert self.asked and all(one.startswith(root) for one in self.asked)
        assert self.complaints == []

    def serious(self) -> list[str]:
        """What axe-core finds that keeps people from using the page, or makes it hard."""
        self.page.evaluate(AXE.read_text())
        found = self.page.evaluate("async () => (await axe.run()).violations")
        return [f"{one['id']}: {one['nodes'][0]['html']}" for one in found if one["impact"] in ("serious", "critical")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    assert CHROMIUM and AXE.exists(), "make test-browser brings both"
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def tab(browser: Any) -> Iterator[Callable[[str], Tab]]:
    contexts = []

    def make(view: str = "light") -> Tab:
        contexts.append(browser.new_context(**VIEWS[view]))
        return Tab(contexts[-1].new_page())

    yield make
    for context in contexts:
        context.close()


@pytest.fixture
def working(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkingFolder:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    return WorkingFolder()


def points_of(tab: Tab, name: str) -> list[dict[str, Any]]:
    return tab.page.evaluate("name => page.run(name).history.points", name)


def test_the_page_is_live_during_a_real_run_of_two_workers(tab: Callable[..., Tab], tmp_path: Path) -> None:
    place = Place(tmp_path / "place")
    arguments = (f"train.budget={STEPS} steps", "report.evaluate=40 steps", "--page", "--no-check", "--no-timing")
    process = place.start("train", "tiny.toml", "run.name=live", *arguments)
    assert process.stdout is not None
    found = ADDRESS.search(process.stdout.readline())
    assert found
    url, shown = found.group(), tab()
    shown.open(url)
    shown.page.wait_for_selector("#loss path.smooth", timeout=90_000)
    assert shown.page.inner_text("h1") == "live" and shown.page.inner_text(".state") == "training"
    first = int(shown.page.evaluate("page.run('live').lastStep"))
    shown.until(f"page.run('live').lastStep >= {first + 20}")
    shown.page.wait_for_selector("#ranks .row >> nth=1", timeout=60_000)
    shown.page.wait_for_selector("#loss circle.held", timeout=60_000)
    points = points_of(shown, "live")
    written = [line for line in place.lines("live") if "loss" in line]
    assert len(points) > 20 and points[0]["first"] == 1
    for point, line in zip(points, written, strict=False):
        assert all(point[key] == line[key] for key in ("loss", "tokens_per_s", "step_s", "grad_norm", "lr", "tokens"))
    evaluations = shown.page.evaluate("page.run('live').evaluations")
    held_out = {line["step"]: line["eval_loss"] for line in place.lines("live") if "eval_loss" in line}
    assert evaluations and all(one["eval_loss"] == held_out[one["step"]] for one in evaluations)
    last = int(shown.page.evaluate("page.run('live').view.step"))
    assert f"of {STEPS:,}" in shown.page.inner_text(".progress-words") and last > first
    assert "tokens a second" in shown.page.inner_text(".facts")
    assert shown.serious() == []
    kill_group(process, signal.SIGINT)
    assert ended(process).code == 130
    # Its address is gone with the run, which is no mistake of the page's: what it showed stays, and it says so.
    shown.until("document.getElementById('link').textContent.includes('plait watch')")
    assert points_of(shown, "live")
    shown.complaints = [one for one in shown.complaints if "ERR_CONNECTION_REFUSED" not in one]
    shown.assert_clean(url)


@pytest.fixture
def eventful(working: WorkingFolder) -> RunFolder:
    """A run with an incident and a change of shares, and a second run to compare it with."""
    written_run(working, "second", loss=2.4)
    folder = written_run(working, "first", steps_done=60)
    write_rank_times(folder, steps=60, compute_s=0.02, data_s=0.02)
    append_shares(folder.shares, SharesLine(step=20, shares=(5, 3), reason="host b is slow", speeds=(2.0, 1.0)))
    line = incident_of(1, 40, decision="started again", resumed_from=30)
    folder.incidents.write_text(json.dumps({key: getattr(line, key) for key in line.__slots__}) + "\n")
    append_start(folder.starts, StartLine(generation=2, steps_done=30, at="2026-11-28T10:02:00+00:00"))
    return folder


@pytest.mark.parametrize("view", VIEWS)
def test_everybody_can_use_it(tab: Callable[..., Tab], working: WorkingFolder, eventful: RunFolder, view: str) -> None:
    with page_server(["first"], working) as address:
        shown = tab(view)
        shown.open(address.url)
        shown.page.wait_for_selector("#loss path.smooth")
        assert shown.page.evaluate("document.documentElement.scrollWidth") <= VIEWS[view]["viewport"]["width"]
        assert "was killed by SIGKILL" in shown.page.inner_text("#incidents")
        assert "Waiting for training data takes 40%" in shown.page.inner_text("#limits .limit")
        assert "1.7" in shown.page.inner_text("#limits .remedies")
        assert "host b is slow" in shown.page.inner_text("#shares")
        assert shown.page.inner_text("#command code") == "plait train runs/first/recipe.toml"
        assert shown.serious() == []
        shown.page.evaluate("page.choose(['first', 'second'])")
        shown.page.wait_for_selector("#compared tbody tr >> nth=1")
        assert shown.page.locator("#loss path.smooth").count() == 2
        assert shown.serious() == []
        assert shown.page.evaluate("document.documentElement.scrollWidth") <= VIEWS[view]["viewport"]["width"]
        shown.assert_clean(address.url)


def test_the_keyboard_reaches_runs_and_values(
    tab: Callable[..., Tab], working: WorkingFolder, eventful: RunFolder
) -> None:
    with page_server(["first"], working) as address:
        shown = tab()
        shown.open(address.url)
        page = shown.page
        page.wait_for_selector("#loss path.smooth")
        page.focus("#loss .chart")
        for key in ("Home", "ArrowRight", "ArrowRight"):
            page.keyboard.press(key)
        line = json.loads(eventful.metrics.read_text().splitlines()[2])
        assert page.inner_text("#loss .chart .unseen").startswith("step 3,") and f"{line['loss']:.4g}"[
            :4
        ] in page.inner_text("#loss .tip")
        page.keyboard.press("Escape")
        assert page.is_hidden("#loss .tip")
        page.focus("[data-key='run second']")
        page.keyboard.press("Enter")
        shown.until("document.querySelector('h1').textContent === 'second'")
        page.focus("[data-key='box first']")
        page.keyboard.press("Space")
        page.wait_for_selector("#compared tbody tr >> nth=1")
        assert page.evaluate("document.activeElement.dataset.key") == "box first", "the list was drawn again"
        shown.assert_clean(address.url)


def test_a_run_that_begins_goes_back_and_is_deleted_under_the_page(
    tab: Callable[..., Tab], working: WorkingFolder
) -> None:
    with page_server(["later"], working) as address:
        shown = tab()
        shown.open(address.url)
        page = shown.page
        shown.until("document.body.textContent.includes('later is not here yet')")
        folder = written_run(working, "later", steps_done=50)
        page.evaluate("page.listDueAt = page.run('later').dueAt = 0; page.tick()")
        page.wait_for_selector("#loss path.smooth")
        folder.prepare_resume_at(30)
        page.evaluate("page.listDueAt = page.run('later').dueAt = 0; page.tick()")
        shown.until("page.run('later').history.points.length === 30")
        shutil.rmtree(folder.path)
        page.evaluate("page.listDueAt = page.run('later').dueAt = 0; page.tick()")
        shown.until("document.body.textContent.includes('The folder of this run is gone')")
        assert len(points_of(shown, "later")) == 30


def test_a_tab_stays_small_for_eight_hours_of_lines(tab: Callable[..., Tab], working: WorkingFolder) -> None:
    """576,000 lines, as eight hours of twenty steps a second would write, in half a minute."""
    folder = written_run(working, "long", steps_done=50)
    with lock_run_folder(folder), page_server(["long"], working) as address:
        shown = tab()
        shown.open(address.url)
        page, sizes = shown.page, []
        page.wait_for_selector("#loss path.smooth")
        devtools = page.context.new_cdp_session(page)
        step = 50
        for part in range(24):
            with folder.metrics.open("a") as file:
                file.writelines(step_report(step + one).to_line() for one in range(1, 24_001))
            step += 24_000
            page.evaluate("page.run('long').dueAt = 0; page.tick()")
            shown.until(f"page.run('long').lastStep === {step}")
            if part in (7, 23):
                devtools.send("HeapProfiler.collectGarbage")
                heap = devtools.send("Runtime.getHeapUsage")["usedSize"]
                sizes.append((heap, page.evaluate("document.querySelectorAll('*').length")))
        (early_bytes, early_elements), (late_bytes, late_elements) = sizes
        assert late_bytes <= early_bytes + (1 << 20) and late_elements <= early_elements + 50
        assert len(points_of(shown, "long")) <= 1500
        shown.assert_clean(address.url)


@pytest.mark.skipif(
    "UPDATE_PICTURES" not in os.environ,
    reason="UPDATE_PICTURES=WORKING-FOLDER UPDATE_PICTURES_OF=RUN renews the guide's pictures",
)
def test_pictures(tab: Callable[..., Tab]) -> None:
    working = WorkingFolder(Path(os.environ["UPDATE_PICTURES"]))
    PICTURES.mkdir(exist_ok=True)
    names = os.environ.get("UPDATE_PICTURES_OF", "").split()
    with page_server(names, working) as address:
        for view in VIEWS:
            shown = tab(view)
            shown.page.set_viewport_size({**VIEWS[view]["viewport"], "height": 1200})
            shown.open(address.url)
            shown.page.wait_for_selector("#loss path.smooth")
            picture = Image.open(BytesIO(shown.page.screenshot(scale="css")))
            picture.convert("RGB").quantize(256, Image.Quantize.FASTOCTREE).save(
                PICTURES / f"watch-{view}.png", optimize=True
            )
