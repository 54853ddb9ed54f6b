"""The documents that a user reads, and what stands in them: links, inline code and lines of code blocks."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("benchmarks/**/README.md")),
    *sorted(ROOT.glob("plait/**/README.md")),
)
GUIDES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "docs" / "speed.md",
    *sorted(ROOT.glob("docs/guide-*.md")),
)


def name_of(path: Path) -> str:
    """A document as pytest prints it."""
    return str(path.relative_to(ROOT))


def code_lines(text: str) -> list[str]:
    """Lines of code blocks, which are indented by four columns (seven in a list) in this project."""
    return [line.strip() for line in text.splitlines() if re.match(r" {4,}\S", line)]


def inline_code(text: str) -> list[str]:
    """What stands between single backticks, line ends as blanks."""
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("    "))
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]


def plait_commands(line: str) -> list[list[str]]:
    """The words behind each `plait` in a line of shell; a variable stands for 1, and what is optional is left out."""
    words = shlex.split(re.sub(r"\$\w+", "1", line), comments=True)
    commands: list[list[str]] = []
    for before, word in zip(["", *words], words, strict=False):
        if word == "plait" and (before in ("", "exec", "-m") or before.endswith(";")):
            commands.append([])
        elif commands:
            commands[-1].append(word)
    return [_until_end(command) for command in commands]


def _until_end(words: list[str]) -> list[str]:
    kept: list[str] = []
    for word in words:
        if word.startswith(("[", "…", "code=")):
            break
        kept.append(word.rstrip(";"))
        if word.endswith(";"):
            break
    return kept
