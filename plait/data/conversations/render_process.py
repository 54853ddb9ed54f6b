"""Renders a stranger's chat template in a separate process, with limits of time, memory and output."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plait.checked_json import one_line, printable
from plait.errors import PlaitError

# Note [a template is a stranger's program]: Jinja's sandbox keeps a template from files and from Python's insides, but
# not from an endless loop, nor from `"a" * 3000000000`, and folding constants does as much while it compiles. So it is
# compiled and rendered in a child. The kernel ends the child by itself: SIGPROF when one task has used its processor
# time, SIGKILL when the parent's thread ends; without tasks it ends when its input does. A task that wants too much
# memory gets a MemoryError. Tasks and answers are lines of JSON; all tasks of a batch are one line, which the child has
# read before it answers, so that neither waits for the other to read.

SECONDS = 10.0
"""Processor time that a task may take, and one second more for each of its MB."""
_MEMORY_BYTES = 1 << 29
_OUTPUT_CHARACTERS = 1 << 24
_PER_BYTE = 32
"""Bytes of memory, and of output, that each byte of a task allows beyond that."""
_PR_SET_PDEATHSIG = 1
_SHOWN_CHARACTERS = 200

Task = Mapping[str, Any]
RenderReply = dict[str, Any]


class RenderProcess:
    """A child that has compiled one template; it is started where none runs.

    `begin` is its first line: "text", "special" and "date". `where` names the template in sentences. The child
    ends when this is closed or forgotten.
    """

    def __init__(self, begin: Mapping[str, Any], where: str) -> None:
        self._begin, self._where = begin, where
        self._child: subprocess.Popen[bytes] | None = None

    def answers(self, tasks: Sequence[Task]) -> Iterator[RenderReply | PlaitError]:
        """The answer to each task, or why the template refuses it.

        Raises PlaitError where the template is not valid or the child reaches a limit of time: then no task can be
        relied on.
        """
        child = self._running()
        try:
            _send(child, tasks)
            for _ in tasks:
                answer = self._receive(child)
                refused = answer.get("refused")
                yield answer if refused is None else PlaitError(self._sentence(refused, answer["kind"]))
        except BaseException:  # the lines that are still on their way belong to no task
            self.close()
            raise

    def start(self) -> None:
        """Compile the template; raises PlaitError where it is not valid."""
        self._running()

    def close(self) -> None:
        """End the child, if one runs."""
        if self._child is not None:
            self._finalizer()
            self._child = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is None:
            return self._child
        self.close()
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        child = self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "plait.data.conversations.render_process", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C in a terminal reaches the parent alone
        )
        self._finalizer = weakref.finalize(self, _end, child)
        _send(child, self._begin)
        answer = self._receive(child)
        if (refused := answer.get("refused")) is not None:
            self.close()
            raise PlaitError(
                f"the chat template in {self._where} is not valid ({refused}); set data.chat_template to another"
            )
        return child

    def _receive(self, child: subprocess.Popen[bytes]) -> RenderReply:
        assert child.stdout is not None
        line = child.stdout.readline()
        if line.endswith(b"\n"):
            return json.loads(line.decode("utf-8", "surrogatepass"))
        code = child.wait()
        self.close()
        why = f"takes more than {SECONDS:g} s" if code == -signal.SIGPROF else f"ended its process (code {code})"
        raise PlaitError(f"the chat template in {self._where} {why}; set data.chat_template to another")

    def _sentence(self, refused: str, kind: str) -> str:
        return refused if kind == "ours" else f"the chat template in {self._where} refuses these messages ({refused})"


def _send(child: subprocess.Popen[bytes], value: object) -> None:
    """Write a line; a child that has ended is noticed when its answer is read."""
    assert child.stdin is not None
    text = json.dumps(value, ensure_ascii=False, default=lambda one: f"<{type(one).__name__}>")  # as transformers
    with suppress(BrokenPipeError):
        child.stdin.write(text.encode("utf-8", "surrogatepass") + b"\n")
        child.stdin.flush()


def _end(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None and child.stdout is not None
    child.kill()
    with suppress(BrokenPipeError):
        child.stdin.close()
    child.stdout.close()
    child.wait()


def main() -> None:
    """The child: reads what to compile, then batches of tasks, and writes an answer to each."""
    _bind_to(int(sys.argv[1]))
    from plait.data.conversations.jinja_template import BEGIN, END, JinjaTemplate
    from plait.data.conversations.learned import ChatToLearn, LearnedFinder

    finders: list[LearnedFinder] = []

    def compile_template(begin: Task) -> RenderReply:
        template = JinjaTemplate(begin["text"], begin["special"], begin["date"])
        finders.append(LearnedFinder(template))
        return {}

    def do(task: Task) -> RenderReply:
        finder, values = finders[0], {key: value for key, value in task.items() if key != "kind"}
        match task["kind"]:
            case "learn":
                return asdict(finder.find(ChatToLearn(**values)))
            case "ends":
                finder.ends = values["ends"]
                return {}
            case "prompt":
                return {"text": finder.prompt(**values)}
            case "marked":
                messages = finder.checked(values["messages"], values["tools"])
                text, learned = finder.template.marked(messages, values["tools"])
                return {"text": text, "learned": learned}
            case _:
                return {"text": finder.after_answer()}

    for line in iter(sys.stdin.buffer.readline, b""):
        text = line.decode("utf-8", "surrogatepass")
        values = json.loads(text)
        if finders:
            finders[0].edges = "possible" if BEGIN in text or END in text else "none"
        memory = _limit_memory(len(line))
        for task in values if finders else [values]:
            answer = _limited(do if finders else compile_template, task, len(line))
            sys.stdout.buffer.write(answer.encode("utf-8", "surrogatepass") + b"\n")
            sys.stdout.buffer.flush()
        resource.setrlimit(resource.RLIMIT_AS, memory)


def _bind_to(parent: int) -> None:
    """Have the kernel end this process with its parent, and let it write no file and no core."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(limit, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])


def _limit_memory(nbytes: int) -> tuple[int, int]:
    """Let a batch of this size take so much memory beyond what is taken already; returns the limits before."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    here = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = here + _MEMORY_BYTES + _PER_BYTE * nbytes
    if before[0] == resource.RLIM_INFINITY or limit < before[0]:
        resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    return before


def _limited(do: Callable[[Task], RenderReply], task: Task, nbytes: int) -> str:
    """The answer as JSON, or why there is none; `nbytes` is the size of the batch."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS + nbytes / 1e6)
    try:
        answer = do(task)
        if len(answer.get("text", "")) > _OUTPUT_CHARACTERS + _PER_BYTE * nbytes:
            answer = {"refused": "it writes too much text", "kind": "theirs"}
        return json.dumps(answer, ensure_ascii=False)
    except PlaitError as error:
        return json.dumps({"refused": str(error), "kind": "ours"})
    except BaseException as error:  # a template may raise whatever Python has
        return json.dumps({"refused": _described(error), "kind": "theirs"})
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _described(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "it takes too much memory"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    try:
        text = one_line(printable(str(error)))[:_SHOWN_CHARACTERS]
    except BaseException:  # as of an error that holds itself
        text = ""
    return text or type(error).__name__


if __name__ == "__main__":
    main()
