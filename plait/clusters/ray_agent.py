"""What runs in an actor of Ray: a node's agent, and its lines. Only the standard library, as each actor imports it."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

_BAD_INPUT = 2
"""The exit code of PlaitError."""
_DIES_WITH_ITS_PARENT = (  # PR_SET_PDEATHSIG with SIGKILL: a lost actor is a lost node
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, ctypes.c_ulong(9), 0, 0, 0); os.execv(sys.executable, "
    "[sys.executable, *sys.argv[1:]])"
)


class Agent:
    """An actor: the agent of one node, a process that is killed with it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process: subprocess.Popen[str] | None = None
        self._is_to_end = False

    def __repr__(self) -> str:
        """The name beside its lines in Ray's logs."""
        return self._name

    def place(self) -> tuple[str, int]:
        """The address of its machine, and a port that is free there, of those that Linux gives to no program."""
        address = str(import_module("ray").util.get_node_ip_address())
        for port in random.sample(range(20000, 32000), 100):
            with suppress(OSError), socket.socket() as free:
                free.bind((address, port))
                return address, port
        raise OSError(f"none of 100 ports at {address} is free")

    def work(self, arguments: Sequence[str], variables: Mapping[str, str], folder: str, log: str) -> tuple[int, str]:
        """Run Python with `arguments` in a folder to its end; returns its exit code and its last line. Its lines become
        the actor's, which Ray keeps and shows, and are added to the file `log`."""
        if not Path(folder).is_dir():
            return _BAD_INPUT, f"{folder} is not on {socket.gethostname()}; work in a folder that all share"
        # Ray's number of threads is for the actor; plait's plan has its own. Within a Ray that a Slurm job started, the
        # agent must not take itself for one of Slurm's.
        inherited = {
            key: value
            for key, value in os.environ.items()
            if key != "OMP_NUM_THREADS" and not key.startswith(("SLURM_", "PLAIT_NODE_"))
        }
        line = ""
        with (
            Path(log).open("a", encoding="utf-8") as file,
            subprocess.Popen(
                [sys.executable, "-c", _DIES_WITH_ITS_PARENT, *arguments],
                cwd=folder,
                env={**inherited, **variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
            ) as process,
        ):
            self._process = process
            if self._is_to_end:
                process.terminate()
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                file.write(line)
                file.flush()
        return process.returncode, line.strip()

    def stop(self) -> None:
        """Have the agent save and end, now or as soon as it is there."""
        self._is_to_end = True
        if self._process is not None:
            self._process.terminate()
