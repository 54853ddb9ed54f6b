"""W&B as a tracker: online for a person who has logged in, else in files that `wandb sync` sends later."""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Sequence
from contextlib import suppress
from html import escape
from importlib import import_module
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from plait.report.samples_file import SampleReport
from plait.tracking.trackers import EndState, MetricRow, TrackedRun


def open_wandb(run: TrackedRun, run_id: str) -> WandbTracker:
    """The run in W&B's project of the folder's name, or that of WANDB_PROJECT; W&B's own variables apply as usual."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    wandb: Any = import_module("wandb")
    mode: Any = os.environ.get("WANDB_MODE", "online" if _is_logged_in() else "offline")
    opened = wandb.init(
        project=os.environ.get("WANDB_PROJECT", run.project),
        name=run.name,
        id=run_id or secrets.token_hex(6),
        resume="allow",
        dir=run.folder,
        mode=mode,
        config=dict(run.settings),
        # No terminal output, no code, and no repository address.
        settings=wandb.Settings(console="off", disable_git=True, disable_code=True, silent=True),
    )
    return WandbTracker(opened, wandb.Html, run.folder, is_offline=mode != "online")


def _is_logged_in() -> bool:
    """Whether W&B would find a key: in the environment, or where `wandb login` keeps it."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    with suppress(OSError, NetrcParseError):
        return netrc(os.environ.get("NETRC")).authenticators(host) is not None
    return False


class WandbTracker:
    """One run in W&B."""

    def __init__(self, run: Any, html: Any, folder: Path, *, is_offline: bool) -> None:
        self._run, self._html = run, html
        self.run_id: str = run.id
        self.last_step = 0 if is_offline else int(run.step)
        sync = f"wandb sync {shlex.quote(str(folder / 'wandb'))}/offline-run-*"
        self.address = f"offline; send it with: {sync}" if is_offline else str(run.url)

    def log(self, rows: Sequence[MetricRow]) -> None:
        for step, values in rows:
            self._run.log(dict(values), step=step)

    def sample(self, report: SampleReport) -> None:
        text = f"<pre>{escape(report.prompt)}<b>{escape(report.text)}</b></pre>"
        self._run.log({"sample": self._html(text, inject=False)}, step=report.step)

    def finish(self, state: EndState) -> None:
        self._run.finish(exit_code=0)
