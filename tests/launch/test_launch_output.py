"""Output that nobody can read any more, and output that cannot be written for another reason."""

from __future__ import annotations

import os
from contextlib import suppress

import pytest

from plait.launch.local.output import OptionalOutput


def test_what_nobody_reads_is_discarded_to_the_end() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w", encoding="utf-8") as stream:
        output = OptionalOutput(stream)
        output.write("read\n")
        output.flush()
        assert os.read(reading, 100) == b"read\n"
        os.close(reading)
        for _ in range(3):
            output.write("not read\n")
            output.flush()
    assert stream.closed  # and its buffer was flushed without an error


def test_a_full_disk_is_an_error() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    stream = os.fdopen(descriptor, "w", encoding="utf-8", buffering=1)
    with pytest.raises(OSError, match="No space"):
        OptionalOutput(stream).write("text\n")
    with suppress(OSError):
        stream.close()
