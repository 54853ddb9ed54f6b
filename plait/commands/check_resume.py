"""`plait check --resume`: stops the user's program as a scheduler would, starts it again, and compares it with a run
that was not stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from plait.checking.findings import CheckReport
from plait.checking.launch_command import WatchedProgram, output_folders, read_launch_command, with_outputs_in
from plait.checking.launching import GRACE_S, OnPace, StartRank, ignore_pace, read_events, run_watched, start_process
from plait.checking.recorded import Event
from plait.checking.working_copy import copy_working_folder, files_in
from plait.commands.check import (
    DEFAULT_STEPS,
    DEFAULT_WORKERS,
    RUNS_OFFLINE,
    WORKERS_AT_MOST,
    print_what_is_left,
    require_same_python,
    why_unusable,
)
from plait.errors import PlaitError
from plait.launch.local.guard import require_linux
from plait.screen.screen import Screen


def check_resume(
    command: Sequence[str],
    again: Sequence[str] = (),
    *,
    workers: int | None = None,
    steps: int = DEFAULT_STEPS,
    silent_s: float = 60,
    limit_s: float = 600,
    grace_s: float = GRACE_S,
    screen: Screen,
    start: StartRank = start_process,
) -> CheckReport:
    """Run a program undisturbed for `steps` optimizer steps, run it again and stop it with SIGTERM after half of them,
    then start it with the arguments `again` appended, and compare; blocks.

    It runs in copies of the current folder. Raises PlaitError for a command that starts no Python program.
    """
    require_linux()
    program = read_launch_command(command)
    require_same_python(program)
    count = workers if workers is not None else program.workers or DEFAULT_WORKERS
    if not 1 <= count <= WORKERS_AT_MOST:
        raise PlaitError(f"{count} workers: choose --workers from 1 to {WORKERS_AT_MOST}")
    if not 4 <= steps <= 1000:
        raise PlaitError(f"--steps {steps}: to stop a program midway, choose a number from 4 to 1000")
    screen.print(
        f"checks   {program.name}: {steps} steps on {count} processes; then {steps // 2} steps, SIGTERM and a second "
        "start. It runs in copies of this folder; files that it writes elsewhere go to their usual places"
    )

    def say_how_long(first_s: float, step_s: float) -> None:
        starts_s = 2 * first_s + (steps // 2 + steps) * step_s  # the stopped one and the second one
        print_what_is_left(screen, (steps - 2) * step_s + starts_s, first_s, step_s)

    with TemporaryDirectory(prefix="plait-check-") as name:
        trial = _Trial(
            program=_seen_from_here(program), again=again, workers=count, steps=steps, silent_s=silent_s,
            limit_s=limit_s, grace_s=grace_s, on_pace=say_how_long, start=start,
        )  # fmt: skip
        return trial.report(Path(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """One recorded start of the program."""

    folder: Path
    events: Sequence[Sequence[Event]]
    unusable: str
    """Why its records cannot be used; empty if they can."""
    was_killed: bool
    """Whether it was still running at the end of the time that a scheduler grants."""

    def has(self, kind: str) -> Event | None:
        return next((one for rank in self.events for one in rank if one["kind"] == kind), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """A program and the way its three starts are made."""

    program: WatchedProgram
    again: Sequence[str]
    workers: int
    steps: int
    silent_s: float
    limit_s: float
    grace_s: float
    on_pace: OnPace
    """For the undisturbed start."""
    start: StartRank

    def report(self, folder: Path) -> CheckReport:
        from plait.checking.resuming import RecordedRun, compare_resumed, steps_taken

        half = self.steps // 2
        whole = self._run(folder / "undisturbed", "only")
        recorded = RecordedRun(folder=whole.folder, events=whole.events)
        if whole.unusable:
            return self._cannot_judge(whole, whole.unusable)
        if (taken := steps_taken(recorded)) <= half + 1:
            return self._cannot_judge(
                whole, f"the program takes only {taken} optimizer steps, too few to stop it after {half}; let it train "
                "longer, or give fewer --steps",
            )  # fmt: skip
        stopped = folder / "stopped"
        copied = self._copy(stopped)
        first = self._run(stopped, "first", stop_after=half)
        before_stop = RecordedRun(folder=first.folder, events=first.events)
        if first.has("stopping") is None:
            return self._cannot_judge(first, first.unusable or f"the program ended before it had taken {half} steps")
        saved = [path for path, about in _files(stopped).items() if copied.get(path) != about]
        if not saved:
            return self._cannot_judge(first, _saves_nothing(first, steps_taken(before_stop)))
        second = self._run(stopped, "second", words=self.again)
        resumed = RecordedRun(folder=second.folder, events=second.events)
        if second.unusable:
            return self._cannot_judge(second, f"after the stop, the second start fails: {second.unusable}")
        if steps_taken(resumed) == 0:
            return self._cannot_judge(
                second, "some ranks take no optimizer step in the second start, as when a program "
                f"considers training finished; before the stop it had taken {steps_taken(before_stop)} steps",
            )  # fmt: skip
        verdict = compare_resumed(recorded, before_stop, resumed)
        if verdict.reasons:
            return self._cannot_judge(whole, *verdict.reasons)
        if verdict.resumed_after == 0 and not verdict.findings:
            return self._cannot_judge(second, _begins_again(saved, self.again))
        notes = ()
        if first.was_killed:
            notes = (
                f"the program does not end within {self.grace_s:.0f} s of SIGTERM; a scheduler kills it then, as "
                "this check did",
            )
        names = whole.has("step")
        return CheckReport(
            outcome="differs" if verdict.findings else "proven", workers=self.workers, steps=self.steps,
            parameters=len(names["parameters"]) if names else 0, largest_error=None, findings=tuple(verdict.findings),
            reasons=notes, changed=self._changed(whole), stopped_after=verdict.stopped_after,
            resumed_after=verdict.resumed_after,
        )  # fmt: skip

    def _copy(self, folder: Path) -> dict[str, tuple[int, int]]:
        """Copy the working folder into a trial's folder; returns the copied files."""
        own = [Path(one).resolve() for one in output_folders(self.program).values()]
        copy_working_folder(Path.cwd(), folder / "working", without=own)
        return _files(folder)

    def _run(self, folder: Path, name: str, *, words: Sequence[str] = (), stop_after: int | None = None) -> _Start:
        """Start the program in a trial's folder, reusing an earlier copy if there is one."""
        if not (folder / "working").exists():
            self._copy(folder)
        launch = run_watched(
            _writing_below(self.program, words, folder / "outputs"), folder / name, workers=self.workers,
            steps=self.steps, silent_s=self.silent_s, limit_s=self.limit_s, after_s=0, working=folder / "working",
            stop_after=stop_after, grace_s=self.grace_s,
            on_pace=self.on_pace if name == "only" else ignore_pace, start=self.start,
        )  # fmt: skip
        events = [read_events(folder / name, rank) for rank in range(self.workers)]
        unusable = why_unusable(launch, events, folder / name, self.limit_s, self.silent_s) or ""
        has_ended = all(any(one["kind"] == "ended" for one in rank) for rank in events)
        was_killed = stop_after is not None and launch.ending == "enough" and not has_ended
        return _Start(folder=folder / name, events=events, unusable=unusable, was_killed=was_killed)

    def _cannot_judge(self, start: _Start, *reasons: str) -> CheckReport:
        return CheckReport(
            outcome="cannot judge", workers=self.workers, steps=0, parameters=0, largest_error=None, reasons=reasons,
            changed=self._changed(start),
        )  # fmt: skip

    def _changed(self, start: _Start) -> tuple[str, ...]:
        stand_ins = dict.fromkeys(e["what"] for rank in start.events for e in rank if e["kind"] == "stand_in")
        return (RUNS_OFFLINE, *self.program.changed, *stand_ins)


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    return {**files_in(folder / "working"), **files_in(folder / "outputs")}


def _saves_nothing(first: _Start, taken: int) -> str:
    if (outside := first.has("saved_elsewhere")) is not None:
        return (
            f"the program saves to {outside['file']}, which the check leaves alone; let it save below the current "
            "folder, or name its folder with an argument such as --output_dir"
        )
    return (
        f"the program saves no checkpoint in its first {taken} steps, nor on SIGTERM, so a stop loses all of "
        "them; let it save every step or two for this check, or give more --steps"
    )


def _begins_again(saved: Sequence[str], again: Sequence[str]) -> str:
    files = ", ".join(sorted(saved)[:3])
    if again:
        return (
            f"with {' '.join(again)} the second start begins with the initial weights again, although the first wrote "
            f"{files}; check what the program loads"
        )
    return (
        f"the second start begins with the initial weights again, although the first one wrote {files}; if the program "
        'needs an argument to resume, give it, as in --resume-with "--resume_from_checkpoint true"'
    )


def _seen_from_here(program: WatchedProgram) -> WatchedProgram:
    """The program with its file and output folders relative to the current folder, if they are below it, so that they
    are found in a copy of that folder."""
    here = Path.cwd().resolve()

    def relative(path: str) -> str:
        place = Path(path).resolve()
        return str(place.relative_to(here)) if place.is_relative_to(here) else str(place)

    arguments = list(program.arguments)
    for option, value in output_folders(program).items():
        arguments = [
            one.replace(value, relative(value)) if value and value in (one, one.removeprefix(f"{option}=")) else one
            for one in arguments
        ]
    name = relative(program.name) if program.kind == "file" else program.name
    return replace(program, name=name, arguments=tuple(arguments))


def _writing_below(program: WatchedProgram, words: Sequence[str], outputs: Path) -> WatchedProgram:
    """The program with more arguments, and with a temporary folder for outputs that would go outside the current
    folder."""
    outside = [value for value in output_folders(program).values() if Path(value).is_absolute()]
    whole = replace(program, arguments=(*program.arguments, *words))
    if not outside:
        return whole
    moved, _ = with_outputs_in(whole, outputs)
    places = {value: output_folders(moved)[option] for option, value in output_folders(program).items()}

    def below(word: str) -> str:
        for value, place in places.items():
            option, equals, rest = word.rpartition("=")
            if rest.startswith(value + "/"):
                return f"{option}{equals}{place}{rest.removeprefix(value)}"
        return word

    return replace(moved, arguments=tuple(below(one) for one in moved.arguments))
