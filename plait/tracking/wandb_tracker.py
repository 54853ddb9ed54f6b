"""W&B as a tracker: online for a person who has logged in, else in files that `wandb sync` sends later."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from html import escape
from typing import Any

from plait.report.samples_file import SampleReport
from plait.tracking.trackers import EndState, MetricRow, TrackedRun


def open_wandb(run: TrackedRun, run_id: str) -> WandbTracker:
    """The run in W&B's project of the folder's name, or that of WANDB_PROJECT; W&B's own variables hold as ever."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    usual = "online" if wandb.Api(api_key=None).api_key else "offline"
    mode: Any = os.environ.get("WANDB_MODE", usual)
    opened = wandb.init(
        project=os.environ.get("WANDB_PROJECT", run.project),
        name=run.name,
        id=run_id or secrets.token_hex(6),
        resume="allow",
        dir=run.folder,
        mode=mode,
        config=dict(run.settings),
        # Neither the terminal's text, nor code, nor where a repository comes from.
        settings=wandb.Settings(console="off", disable_git=True, disable_code=True, silent=True),
    )
    return WandbTracker(opened, is_offline=mode != "online")


class WandbTracker:
    """One run in W&B."""

    def __init__(self, run: Any, *, is_offline: bool) -> None:
        self._run = run
        self.run_id: str = run.id
        self.last_step = 0 if is_offline else int(run.step)
        self.address = f"offline; send it with: wandb sync {run.dir}" if is_offline else str(run.url)

    def log(self, rows: Sequence[MetricRow]) -> None:
        for step, values in rows:
            self._run.log(dict(values), step=step)

    def sample(self, report: SampleReport) -> None:
        import wandb

        text = f"<pre>{escape(report.prompt)}<b>{escape(report.text)}</b></pre>"
        self._run.log({"sample": wandb.Html(text, inject=False)}, step=report.step)

    def finish(self, state: EndState) -> None:
        self._run.finish(exit_code=0)
