"""`plait.submit`, and what it returns: a job as a value, which says where it stands, and brings its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from plait.arguments import check_arguments, texts_of
from plait.commands.python_call import ProgressDisplay, as_command, screen_for
from plait.commands.runs import Run
from plait.commands.submitting.submit import outgoing_job, request_from_call
from plait.commands.submitting.submitted import end_job, fetch_job, job_log_lines, job_state_line
from plait.errors import PlaitError


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedJob:
    """A job by its name; another process finds it again by `SubmittedJob(name=…)`, in the same current folder."""

    name: str
    """The run's, or the program's without ".py"."""
    text: str = ""
    """The script or the manifests."""

    def __str__(self) -> str:
        return self.text

    @property
    def state(self) -> str:
        """Where it stands by its scheduler's account; raises PlaitError where it was not submitted."""
        with as_command():
            line = job_state_line(self.name)
        if line is None:
            raise PlaitError(f'no job "{self.name}" was submitted from this folder; submit it with deed="send"')
        return line

    def logs(self) -> str:
        """What its first node printed so far."""
        with as_command():
            return "".join(f"{line}\n" for line in job_log_lines(self.name))

    def stop(self) -> None:
        """End it; what it learnt is saved, and the same call of `plait.submit` goes on with it."""
        with as_command():
            end_job(self.name)

    def fetch(self) -> Run:
        """Bring its run into runs/ here; raises PlaitError where it has not begun to train."""
        with as_command():
            fetch_job(self.name, screen_for("off"))
        return Run(self.name)


def submit(
    target: str | Path,
    arguments: Sequence[str] = (),
    *,
    on: Literal["slurm", "ssh", "kubernetes"],
    cluster: str | None = None,
    nodes: int | None = None,
    options: Mapping[str, object] | None = None,
    deed: Literal["send", "show"] = "send",
    progress: ProgressDisplay = "auto",
) -> SubmittedJob:
    """Have a cluster run a recipe (`arguments` are its settings) or a program (its arguments), from the current folder.

    `options`: time, gpus, machines, kind, and what `--with` takes. "show" sends nothing: the job's `text` is what would
    be used. By ssh it blocks to the run's end, else until the scheduler has the job. Raises PlaitError.
    """
    check_arguments(target=target, on=on, cluster=cluster, nodes=nodes, deed=deed, progress=progress)
    with as_command():
        words = (str(target), *texts_of("arguments", arguments))
        outgoing = outgoing_job(request_from_call(words, on, cluster, nodes, options), screen_for(progress))
        if deed == "send":
            outgoing.send()
    return SubmittedJob(name=outgoing.run, text=outgoing.text)
