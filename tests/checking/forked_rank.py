"""Ranks of a check as forks of this process, which has imported torch already: many cases without as many imports."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed.fsdp
import torch.distributed.optim
import torch.nn.parallel

from plait.checking.findings import CheckReport
from plait.checking.watch.program import run_rank
from plait.commands.check import check
from plait.commands.python_call import screen_for

torch.set_num_threads(1)  # a process with OpenMP's threads cannot be forked


@dataclass(slots=True)
class ForkedRank:
    """A rank that was forked; as subprocess.Popen has it."""

    pid: int
    code: int | None = field(default=None)

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code


def start_forked(request: Path, environment: Mapping[str, str], log: Path) -> ForkedRank:
    """Fork this process and run a rank in the fork."""
    pid = os.fork()
    if pid:
        return ForkedRank(pid)
    code = 1
    try:
        os.setsid()
        os.environ.clear()
        os.environ.update(environment)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        run_rank(request)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1 if end.code else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def check_in_forks(program: Path, workers: int, *arguments: str) -> CheckReport:
    """`plait check -- torchrun PROGRAM`, with forks of this process as ranks."""
    command = ["torchrun", "--nproc-per-node", str(workers), str(program), *arguments]
    return check(command, silent_s=240, screen=screen_for("off"), start=start_forked)
