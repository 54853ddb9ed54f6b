"""A timeline's page in a real browser: one file that asks for nothing, for everybody, by keyboard and on a phone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from plait.run_files.timeline_page import timeline_html
from tests.browser.test_browser_watch import VIEWS, Tab, browser, tab  # noqa: F401
from tests.run_files.test_run_files_timeline_page import PAGE

pytestmark = pytest.mark.browser


@pytest.fixture
def address(tmp_path: Path) -> str:
    page = tmp_path / "page.html"
    page.write_text(timeline_html(PAGE))
    return page.as_uri()


@pytest.mark.parametrize("view", VIEWS)
def test_the_page_is_for_everybody(tab: Callable[..., Tab], address: str, view: str) -> None:  # noqa: F811
    shown = tab(view)
    shown.open(address)
    shown.page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    assert shown.serious() == []
    shown.assert_clean(address)
    assert shown.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "no wider than the screen"


def test_the_picture_is_widened_and_moved_by_keyboard(tab: Callable[..., Tab], address: str) -> None:  # noqa: F811
    shown = tab("light")
    shown.open(address)
    width = "document.querySelector('.wide').getBoundingClientRect().width"
    before = shown.page.evaluate(width)
    shown.page.focus("#zoom-1")
    for _ in range(2):
        shown.page.keyboard.press("ArrowRight")
    assert shown.page.evaluate(width) == pytest.approx(4 * before, rel=0.01)
    shown.page.keyboard.press("Tab")
    assert shown.page.evaluate("document.activeElement.className") == "scroll"
    shown.page.keyboard.press("ArrowRight")
    shown.until("document.activeElement.scrollLeft > 0")
    shown.page.hover(".lane.measured i >> nth=0", force=True)
    told = shown.page.evaluate(
        "getComputedStyle(document.querySelector('.lane.measured i:hover'), '::after').getPropertyValue('content')"
    )
    assert "stage 1" in told
