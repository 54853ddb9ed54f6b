"""Trains a tokenizer in a separate process, so that a signal ends it at once and progress goes on being shown."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from plait.data.preparation.tokens import Tokenizer, check_bpe_vocabulary, load_trained, train_bpe
from plait.errors import PlaitError

# Note [a signal must not wait]: `tokenizers` learns merges in one call that returns after minutes, and no signal
# handler of Python runs before it does. Here that call runs in a child: the parent waits in calls that a signal
# interrupts, and kills the child when it leaves. The texts go there as frames of a length (8 bytes) and UTF-8; a frame
# of length 0 ends them. Without it, as after the parent's death, the child trains nothing.

_WAIT_S = 1.0


def train_bpe_apart(texts: Iterable[str], vocabulary: int, on_wait: Callable[[], None]) -> Tokenizer:
    """The tokenizer of `train_bpe`, trained in a child process; blocks, and calls `on_wait` about once a second after
    the last text was sent.

    Raises PlaitError for a vocabulary that is too small, and where the child was killed.
    """
    check_bpe_vocabulary(vocabulary)
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "plait.data.preparation.bpe_process", str(vocabulary)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,  # Ctrl-C in a terminal reaches the parent alone
    )
    assert child.stdin and child.stdout
    try:
        _send(child.stdin.write, child.stdin.flush, texts)
        while not select.select([child.stdout], [], [], _WAIT_S)[0]:
            on_wait()
        definition = child.stdout.read().decode("utf-8")
    except BrokenPipeError:
        definition = ""
    finally:
        child.kill()
        with suppress(BrokenPipeError):  # what was not yet sent is lost
            child.stdin.close()
        child.stdout.close()
        code = child.wait()
    if not definition:
        raise PlaitError(
            f"the process that trains the tokenizer ended early (code {code}); free some memory and run it again"
        )
    return load_trained(definition)


def main() -> None:
    """The child: reads texts from stdin, writes the tokenizer's JSON to stdout."""
    trained = train_bpe(_received(), int(sys.argv[1]))
    sys.stdout.buffer.write(trained.definition.encode("utf-8"))
    sys.stdout.buffer.flush()


def _send(write: Callable[[bytes], object], flush: Callable[[], None], texts: Iterable[str]) -> None:
    for text in texts:
        data = text.encode("utf-8")
        write(len(data).to_bytes(8, "little") + data)
    write(bytes(8))
    flush()


def _received() -> Iterator[str]:
    source = sys.stdin.buffer
    while length := int.from_bytes(header := source.read(8), "little"):
        yield source.read(length).decode("utf-8")
    if len(header) < 8:  # the parent has ended
        sys.exit(1)


if __name__ == "__main__":
    main()
