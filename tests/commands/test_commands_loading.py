"""While a model loads something moves on stderr; what is piped from stdout is the model's text alone."""

from __future__ import annotations

import os
import pty
import sys
from pathlib import Path
from subprocess import PIPE, Popen

import pytest


@pytest.mark.parametrize("command", ["sample", "chat"])
def test_a_terminal_sees_the_model_loading_and_the_pipe_does_not(command: str, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    arguments = [sys.executable, "-m", "plait", command, "nobody"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    with Popen(arguments, cwd=tmp_path, stdin=theirs, stdout=PIPE, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = _read(ours)
        assert process.stdout and process.stdout.read() == b""
    os.close(ours)
    assert process.returncode == 2
    assert "loading nobody" in shown and 'there is no run "nobody"' in shown


def _read(terminal: int) -> str:
    data = b""
    try:
        while some := os.read(terminal, 4096):
            data += some
    except OSError:  # how Linux says that the other end is closed
        pass
    return data.decode()
