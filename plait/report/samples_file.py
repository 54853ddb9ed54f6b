"""runs/NAME/samples.jsonl: what the model wrote at certain steps, always from the same beginning and seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from plait.checked_json import one_line, parse_json, typed_value
from plait.errors import PlaitError
from plait.regular_file import read_regular_file
from plait.report.atomic import replace_file

_SHOWN_CHARACTERS, _SHOWN_OF_PROMPT = 160, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleReport:
    """The model's text after `step` steps (0: before the first). `text` does not repeat the prompt."""

    step: int
    prompt: str
    text: str

    def to_line(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)

    def in_short(self) -> str:
        """The beginning of the sample on one line, after the end of its prompt, for a terminal."""
        written = one_line(f"{self.prompt[-_SHOWN_OF_PROMPT:]}{self.text}")
        cut = f"{written[:_SHOWN_CHARACTERS]}…" if len(written) > _SHOWN_CHARACTERS else written
        return f"sample   step {self.step}: {cut}"


def read_samples(path: Path) -> Sequence[SampleReport]:
    """All samples of a run in the order of steps; empty if there is no file. Ignores a last line without a newline;
    raises PlaitError with the number of an invalid line."""
    try:
        lines = read_regular_file(path).split(b"\n")[:-1] if path.exists() else []
    except ValueError as error:
        raise PlaitError(f"{path} cannot be read ({error}); move it away") from None
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(typed_value(SampleReport, parse_json(line)))
        except ValueError as error:
            raise PlaitError(f"{path}:{number} is not a sample of a run ({error}); delete the line") from None
    return found


def trim_samples(path: Path, steps_done: int) -> None:
    """Remove samples of steps that are now repeated. Raises PlaitError."""
    if path.exists():
        kept = [one for one in read_samples(path) if one.step < steps_done or 0 < one.step == steps_done]
        replace_file(path, "".join(f"{one.to_line()}\n" for one in kept).encode())
