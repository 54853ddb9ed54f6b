"""The site's list of pages has every guide, its gallery every recipe, and its check finds links that lead nowhere."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.docs.documents import ROOT

SITE = ROOT / "docs" / "site"


@pytest.fixture(scope="module")
def build() -> Any:
    spec = importlib.util.spec_from_file_location("site_build", SITE / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def listed(entries: list[Any]) -> list[str]:
    """The pages in a navigation, chapter by chapter."""
    found: list[str] = []
    for entry in entries:
        for target in entry.values():
            found += [target] if isinstance(target, str) else listed(target)
    return found


def test_every_guide_is_in_the_navigation_once(build: Any) -> None:
    pages = listed(tomllib.loads((SITE / "zensical.toml").read_text())["project"]["nav"])
    documents = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert documents | {"index.md", "guides.md", "contributing.md", "recipes.md", "decisions/index.md"} == set(pages)
    assert len(pages) == len(set(pages)) and set(pages) <= set(build.PAGES.values())


def test_the_gallery_has_every_recipe(build: Any) -> None:
    recipes = {path.stem for path in (ROOT / "recipes").glob("*.toml")}
    assert tomllib.loads((SITE / "gallery.toml").read_text()).keys() == recipes
    assert {f"recipes/{name}.md" for name in recipes} <= set(build.PAGES.values())
    assert all(build.first_comment(ROOT / "recipes" / f"{name}.toml") for name in recipes)


def test_links_follow_their_documents_to_the_site(build: Any) -> None:
    extra: dict[Path, str] = {}
    text = "[a](../README.md#make) [b](guide-run.md) [c](../recipes/07-experts.toml) [d](../NOTICE) [e](https://x.y)"
    found = build.page_text(text, Path("docs/guide-plan.md"), "guide-plan.md", extra)
    assert found == "[a](index.md#make) [b](guide-run.md) [c](recipes/07-experts.md) [d](files/NOTICE) [e](https://x.y)"
    assert extra == {Path("NOTICE"): "files/NOTICE"}


def test_lists_are_widened_for_python_markdown(build: Any) -> None:
    lines = ["A text:", "- one", "  goes on", "  - within", "- two", "", "1. first", "   more", "no list"]
    assert list(build.with_wide_lists(lines)) == [
        "A text:", "", "- one", "    goes on", "    - within", "- two", "", "1. first", "    more", "no list",
    ]  # fmt: skip


def test_links_that_lead_nowhere_or_elsewhere_are_found(build: Any, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(
        '<h1 id="top">x</h1><a href="other.html#here">y</a><a href="#top">t</a><a href="gone.html">g</a>'
        '<a href="other.html#away">a</a><a href="https://elsewhere.example">fine</a>'
        '<script src="https://cdn.example/x.js"></script><img src="picture.png">'
    )
    (tmp_path / "other.html").write_text('<h2 id="here">z</h2>')
    assert sorted(build.broken_links(tmp_path)) == [
        "index.html loads https://cdn.example/x.js",
        "index.html: gone.html",
        "index.html: other.html#away (no such heading)",
        "index.html: picture.png",
    ]
