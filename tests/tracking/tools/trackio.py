"""What plait asks of the package trackio, done in a file of JSON lines in TRACKIO_DIR."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Markdown:
    """A text in a run."""

    text: str


class Run:
    """A run that is open."""

    def __init__(self, project: str, name: str) -> None:
        self.name = name
        self._file = Path(os.environ["TRACKIO_DIR"]) / f"{project}-{name}.jsonl"

    def log(self, values: Mapping[str, object], step: int) -> None:
        if os.environ.get("TRACKIO_FAILS_AT") == str(step):
            raise ConnectionError("the disk of the tool is full")
        self._write({"step": step, **{key: getattr(value, "text", value) for key, value in values.items()}})

    def finish(self) -> None:
        self._write({"finished": True})

    def _write(self, line: Mapping[str, object]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")


def init(*, project: str, name: str, resume: str, config: Mapping[str, object]) -> Run:
    print("what a library prints goes to the log")
    run = Run(project, name)
    run._write({"resume": resume, "config": dict(config)})
    return run
