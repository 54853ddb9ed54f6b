"""What `plait data --show` prints: what is learned stands out, with and without colours."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from plait.commands.data import prepare_text
from plait.screen.terminal import TerminalScreen
from tests.commands.golden import assert_golden

TALKS = (
    (("user", "What is AI?"), ("assistant", "A field of research.")),
    (("system", "Be brief."), ("user", "Are you sure?"), ("assistant", "Yes."), ("user", "Why?"), ("assistant", "So.")),
    (("user", "Say \x1b[31mred\x1b[0m."), ("assistant", "Red.")),
)
RECIPE = """
[data]
files = "chats.jsonl"
tokenizer = "gpt2"
holdout = 0

[train]
sequence = 64
"""


@pytest.fixture(autouse=True)
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in TALKS]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "talk.toml").write_text(RECIPE)
    return tmp_path / "talk.toml"


def shown(recipe: Path, *overrides: str, **console: object) -> str:
    out = io.StringIO()
    screen = TerminalScreen(Console(file=out, width=80, **console))  # type: ignore[arg-type]
    prepare_text(recipe, overrides, show=3, screen=screen)
    kept = (line for line in out.getvalue().splitlines() if not line.startswith("ready "))
    return "\n".join(line.rstrip() for line in kept)


def test_what_is_learnt_stands_in_brackets_where_there_are_no_colours(recipe: Path) -> None:
    assert_golden("data-show", shown(recipe))


def test_what_is_learnt_is_green_on_a_terminal(recipe: Path) -> None:
    text = shown(recipe, force_terminal=True, color_system="standard")
    assert "\x1b[1;32mA field of research.<|endoftext|>\x1b[0m" in text and "⟦" not in text
    assert "\\x1b[31mred" in text, "a sample cannot colour the terminal"


def test_a_text_is_learnt_but_for_the_end_before_it(recipe: Path) -> None:
    (recipe.parent / "play.txt").write_text("To be or not to be. " * 40)
    text = shown(recipe, "data.files=play.txt")
    assert "<|endoftext|>⟦To be or not to be. " in text and text.rstrip().endswith("<|endoftext|>⟧")
    assert "packing" not in text


@pytest.mark.slow
def test_the_examples_that_are_counted_are_those_that_are_learnt_from(recipe: Path) -> None:
    long = {"messages": [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "one two " * 40}]}
    file = recipe.parent / "chats.jsonl"
    file.write_text(file.read_text() + (json.dumps(long) + "\n") * 5)
    assert "; 8 examples, " in shown(recipe, "train.sequence=256", "data.overlong=drop")
    text = shown(recipe, "data.overlong=drop")
    assert "; 3 examples, " in text
    assert "overlong 5 examples of more than 64 tokens: left out (data.overlong); 3 examples learned from" in text
    assert "overlong 5 examples of more than 64 tokens: cut at a window's end (data.overlong); 8 examples" in shown(
        recipe, "data.overlong=cut"
    )
