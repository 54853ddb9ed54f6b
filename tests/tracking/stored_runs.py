"""What the real tools have kept of a run, as JSON on standard output: `python stored_runs.py TOOL FOLDER`.

It runs apart from the tests, where the tools' packages come before the tests' own.
"""

from __future__ import annotations

import json
import sqlite3
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER, FILE_HEADER = 32768, 7, 7


def wandb_lines(folder: Path) -> Iterator[dict[str, Any]]:
    """The history of all parts of an offline run: records in LevelDB's log format, of W&B's own messages."""
    from wandb.proto import wandb_internal_pb2

    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for data in records(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.WhichOneof("record_type") == "run":
                settings = {item.key: json.loads(item.value_json) for item in record.run.config.update}
                yield {"id": record.run.run_id, "name": record.run.display_name, "settings": settings}
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
                media = {"sample": True} if any(key.startswith("sample") for key in values) else {}
                yield {**values, **media, "step": values["_step"]}


def records(data: bytes) -> Iterator[bytes]:
    at, parts = FILE_HEADER, list[bytes]()
    while at + HEADER <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + HEADER])
        if kind == 0:
            return
        parts.append(data[at + HEADER : at + HEADER + length])
        at += HEADER + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield b"".join(parts)
            parts = []


def mlflow_lines(folder: Path) -> Iterator[dict[str, Any]]:
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    for experiment in client.search_experiments():
        for run in client.search_runs([experiment.experiment_id]):
            params = dict(run.data.params)
            yield {"id": run.info.run_id, "name": run.info.run_name, "settings": params, "status": run.info.status}
            for key in ("loss", "eval_loss"):
                yield from (
                    {"step": one.step, key: one.value} for one in client.get_metric_history(run.info.run_id, key)
                )
            for file in client.list_artifacts(run.info.run_id, "samples"):
                yield {"step": int(Path(file.path).stem.removeprefix("step-")), "sample": file.path}


def trackio_lines(folder: Path) -> Iterator[dict[str, Any]]:
    [database] = (folder / "trackio").glob("*.db")
    with sqlite3.connect(database) as opened:
        yield from (
            {"id": name, "name": name, "settings": json.loads(config)}
            for name, config in opened.execute("SELECT run_name, config FROM configs")
        )
        rows = opened.execute("SELECT step, metrics FROM metrics ORDER BY id")
        yield from ({"step": step, **json.loads(metrics)} for step, metrics in rows)


if __name__ == "__main__":
    found = {"wandb": wandb_lines, "mlflow": mlflow_lines, "trackio": trackio_lines}[sys.argv[1]](Path(sys.argv[2]))
    print(json.dumps(list(found)))
