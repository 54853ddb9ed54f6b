"""The request to the workers of an evaluation, and the answer of each."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from plait.checked_json import parse_object, typed_value
from plait.commands.models.found_model import StoredModel
from plait.data.choices import ChoiceRow
from plait.data.samples.sizes import Overlong
from plait.partition.execution import MatmulBackend, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """One evaluation by several workers of this machine. The windows of a text are as long as the model's shape says;
    a choice is a micro-batch by itself."""

    model: StoredModel
    precision: Precision
    matmul_backend: MatmulBackend
    corpus: str
    """Folder of the prepared text to measure; empty where only choices are asked."""
    part: Literal["heldout", "train"]
    """The part of `corpus` that is measured: other files are all in its training part."""
    micro_sequences: int
    documents: Literal["mask", "join"]
    overlong: Overlong
    """What happens to a chat that is longer than a window."""
    eot: int
    gpus: tuple[int, ...]
    """torch's numbers of the GPUs, one for each worker; empty: the processor."""
    folder: str
    """For the choices (ROWS) and the workers' answers."""

    def to_json(self) -> str:
        """The request as a job's argument; `from_json` reads it back."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> EvaluationRequest:
        """The request that a worker was started with."""
        return typed_value(EvaluationRequest, parse_object(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationAnswer:
    """One worker's results: a loss in nats and the number of tokens for each of its micro-batches, in order."""

    text_losses: tuple[float, ...] = ()
    text_tokens: tuple[float, ...] = ()
    row_losses: tuple[float, ...] = ()


def write_answer(folder: str, rank: int, answer: EvaluationAnswer) -> None:
    """Leave a worker's answer; losses that are not finite are written as Python's JSON words them."""
    _answer_file(folder, rank).write_text(json.dumps(asdict(answer)), encoding="utf-8")


def read_answer(folder: str, rank: int) -> EvaluationAnswer:
    """The answer that a worker left."""
    values: dict[str, Any] = json.loads(_answer_file(folder, rank).read_text(encoding="utf-8"))
    return EvaluationAnswer(**{key: tuple(numbers) for key, numbers in values.items()})


def write_rows(folder: str, rows: tuple[ChoiceRow, ...]) -> None:
    """Leave the choices for the workers."""
    text = json.dumps([[row.tokens, row.first, row.text_bytes] for row in rows])
    (Path(folder) / "rows.json").write_text(text, encoding="utf-8")


def read_rows(folder: str) -> tuple[ChoiceRow, ...]:
    """The choices that were left."""
    rows = json.loads((Path(folder) / "rows.json").read_text(encoding="utf-8"))
    return tuple(ChoiceRow(tokens=tuple(tokens), first=first, text_bytes=size) for tokens, first, size in rows)


def _answer_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank-{rank}.json"
