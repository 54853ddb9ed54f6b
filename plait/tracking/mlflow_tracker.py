"""MLflow as a tracker: at MLFLOW_TRACKING_URI, else in the store that MLflow itself makes in the current folder."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from plait.report.samples_file import SampleReport
from plait.tracking.trackers import EndState, MetricRow, TrackedRun

_MOST_METRICS, _MOST_PARAMS = 1000, 100
"""MLflow's own limits for one request."""
_LONGEST_PARAM = 500


def open_mlflow(run: TrackedRun, run_id: str) -> MlflowTracker:
    """The run in MLflow's experiment of the folder's name, or that of MLFLOW_EXPERIMENT_NAME."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # nothing is sent except to the store
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    mlflow: Any = import_module("mlflow")
    client = mlflow.MlflowClient()
    if run_id:
        client.update_run(run_id, status="RUNNING")
        return MlflowTracker(mlflow, client, run_id)
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", run.project)
    known = client.get_experiment_by_name(name)
    experiment = known.experiment_id if known else client.create_experiment(name)
    new = client.create_run(experiment, run_name=run.name)
    params = [mlflow.entities.Param(key, str(value)[:_LONGEST_PARAM]) for key, value in run.settings.items()]
    for first in range(0, len(params), _MOST_PARAMS):
        client.log_batch(new.info.run_id, params=params[first : first + _MOST_PARAMS])
    return MlflowTracker(mlflow, client, new.info.run_id)


class MlflowTracker:
    """One run in MLflow."""

    def __init__(self, mlflow: Any, client: Any, run_id: str) -> None:
        self._metric, self._client, self.run_id = mlflow.entities.Metric, client, run_id
        history = client.get_metric_history(run_id, "loss")
        self.last_step: int = max((one.step for one in history), default=0)
        self.address = f"run {run_id} at {mlflow.get_tracking_uri()}"

    def log(self, rows: Sequence[MetricRow]) -> None:
        now_ms = int(1000 * time.time())
        metrics = [self._metric(name, value, now_ms, step) for step, values in rows for name, value in values.items()]
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self.run_id, metrics=metrics[first : first + _MOST_METRICS])

    def sample(self, report: SampleReport) -> None:
        self._client.log_text(self.run_id, f"{report.prompt}{report.text}\n", f"samples/step-{report.step:08d}.txt")

    def finish(self, state: EndState) -> None:
        self._client.set_terminated(self.run_id, "FINISHED" if state == "finished" else "KILLED")
