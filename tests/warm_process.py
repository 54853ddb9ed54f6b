"""A process that has imported what tests need, and forks for each call: fresh processes without the time of imports."""

from __future__ import annotations

import atexit
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


class WarmProcess:
    """Runs functions in forks of one process, one after another; `forbidden` is a package that it must not have."""

    def __init__(self, preload: Sequence[str], forbidden: str | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps({"preload": preload, "forbidden": forbidden})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )

    def call(self, folder: Path, function: str, *arguments: Any) -> Any:
        """What "module:function" returns (JSON) for arguments (JSON) in that folder; AssertionError where it raises."""
        order = {"folder": str(folder), "function": function, "arguments": arguments}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert "failed" not in answer, answer["failed"]
        return answer["returned"]

    def command(self, folder: Path, *arguments: str, environment: Mapping[str, str]) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of `plait` with these arguments, in that folder."""
        code, out, err = self.call(folder, f"{__name__}:run_command", arguments, dict(environment))
        return code, out, err

    def close(self) -> None:
        self._process.communicate()


def run_command(arguments: list[str], environment: dict[str, str]) -> tuple[int, str, str]:
    """Run `plait` in this process, which is used up by it."""
    from plait.cli import main

    os.environ.update(environment)
    sys.argv = ["plait", *arguments]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8") for number in (1, 2))
        code = _exit_code_of(main)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        texts = [file.seek(0) or file.read().decode() for file in (out, err)]
    return code, texts[0], texts[1]


def _exit_code_of(main: Callable[[], None]) -> int:
    try:
        main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def _answer(order: dict[str, Any]) -> dict[str, Any]:
    """Of one order, in a process of its own."""
    try:
        os.chdir(order["folder"])
        module, _, function = order["function"].partition(":")
        return {"returned": getattr(importlib.import_module(module), function)(*order["arguments"])}
    except BaseException:
        return {"failed": traceback.format_exc()}


def serve(preload: Sequence[str], forbidden: str | None) -> None:
    """Answer one order a line from stdin, each with a line on stdout."""
    for name in preload:
        importlib.import_module(name)
    assert forbidden not in sys.modules
    answers = os.dup(1)
    os.dup2(2, 1)  # what a call prints is no answer
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setsid()
            os.write(answers, (json.dumps(_answer(order)) + "\n").encode())
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status != 0:
            os.write(answers, (json.dumps({"failed": f"it ended with status {status}"}) + "\n").encode())


if __name__ == "__main__":
    serve(**json.loads(sys.argv[1]))
