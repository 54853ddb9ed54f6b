"""`python -m benchmarks.lab --grid FILE --json OUT [--only CASE] [--runner joined|torchrun] [--report]`"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lab.demands import demands, demands_text
from benchmarks.lab.grid import Case, read_grid
from benchmarks.lab.hosts import ROOT, require_root
from benchmarks.lab.journal import append_line, read_lines
from benchmarks.lab.leftovers import sweep
from benchmarks.lab.orders import JoinedRunner, Runner, TorchrunRunner
from benchmarks.lab.picture import pictures
from benchmarks.lab.report import case_table, summary, summary_text, verdict, verdict_text
from benchmarks.lab.trial import Site, run_case
from benchmarks.machine import describe
from plait.errors import PlaitError, RunFailed

WORK = ROOT / ".plait" / "lab"


def main() -> None:
    flags = _flags()
    grid = read_grid(flags.grid)
    done = {line["key"] for line in read_lines(flags.json)}
    asked = [case for case in grid.cases if not flags.only or flags.only in case.name]
    if not asked:
        raise PlaitError(f'no case of {flags.grid} has "{flags.only}" in its name; the first is "{grid.cases[0].name}"')
    refused: list[str] = []
    if not flags.report:
        require_root()
        for name in sweep():
            print(f"took down what {name} had left")
        site = Site(runner=_runner(flags.runner), work=WORK, grid=grid)
        refused = _run([case for case in asked if case.key not in done], len(asked), site, flags.json)
    _report(flags.json, {case.key for case in asked})
    if refused:
        raise RunFailed(f"{len(refused)} of {len(asked)} cases were refused; give the same command again for them")


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lab", description="Every layout on real links.")
    parser.add_argument("--grid", type=Path, default=Path(__file__).with_name("grid.toml"))
    parser.add_argument("--json", type=Path, required=True, help="one line a finished case; what stands there is kept")
    parser.add_argument("--only", default="", help="only cases with this in their name")
    parser.add_argument("--runner", choices=("joined", "torchrun"), default="joined")
    parser.add_argument("--report", action="store_true", help="only tell and draw what the file holds")
    return parser.parse_args()


def _runner(name: str) -> Runner:
    if name == "torchrun":
        return TorchrunRunner()
    from plait.hosts.handshake import new_secret

    return JoinedRunner(new_secret().text)


def _run(cases: Sequence[Case], asked: int, site: Site, out: Path) -> list[str]:
    """Run what is not done yet; answers the cases that were refused."""
    refused: list[str] = []
    print(f"{asked} cases, {len(cases)} still to run, {site.grid.steps} steps a turn")
    machine = describe()
    for number, case in enumerate(cases, start=1):
        began, date = time.monotonic(), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        print(f"\n{number}/{len(cases)} {case.name}", flush=True)
        try:
            values = run_case(case, site, lambda text: print(text, flush=True))
        except PlaitError as error:
            print(f"  refused  {error}", flush=True)
            refused.append(case.name)
            continue
        append_line(out, {**values, "date": date, "machine": machine, "took_s": round(time.monotonic() - began, 1)})
        print(f"  took     {time.monotonic() - began:.0f} s")
    return refused


def _report(out: Path, keys: set[str]) -> None:
    lines = [line for line in read_lines(out) if line["key"] in keys]
    verdicts = []
    for line in lines:
        print(f"\n{line['case']['name']}\n\n{case_table(line)}\n")
        try:
            verdicts.append(verdict(line))
            print(verdict_text(verdicts[-1]))
        except ValueError as error:
            print(f"not judged: {error}")
    if verdicts:
        whole = summary(verdicts)
        print(f"\n{summary_text(whole)}\n\n{demands_text(demands(whole, verdicts))}")
    for path, text in pictures(lines, out).items():
        path.write_text(text)
        print(f"drawn    {path}")


if __name__ == "__main__":
    try:
        main()
    except PlaitError as error:
        sys.stderr.write(f"lab: {error}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
