"""The file in memory that holds copies of ranks' states: the supervisor's end, and a rank's."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from zlib import crc32

from plait.launch.values.copies import OUTBOX, SLOTS, CopyPart, KeptCopy
from plait.regular_file import reserve_space

# Addresses in a file that takes memory only where something was written: ranks need not know each other's sizes.
_REGION_BYTES, _SLOT_BYTES, _RECORDS_BYTES = 1 << 41, 1 << 38, 1 << 16
_TEXT_BYTES = 1 << 28
_RECORD = struct.Struct("<8sQQQQ")
_SUM = struct.Struct("<I")
_RECORD_BYTES = 64
_WHOLE, _TORN = b"plait ok", b"being wr"
assert _RECORD.size + _SUM.size <= _RECORD_BYTES and _RECORDS_BYTES + (OUTBOX + 1) * _SLOT_BYTES <= _REGION_BYTES


class AgentMemory:
    """The end of the process that outlives the ranks; `descriptor` is for them."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("plait-state")

    def close(self) -> None:
        """Give it up; the memory is free once no rank has it any more. May be called twice."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def whole_steps(self, ranks: int, lineage: int) -> Sequence[int]:
        """The steps of which each of a host's ranks has a whole copy of this lineage, the newest first."""
        kept = [
            {copy.step for copy in _copies(self.descriptor, rank) if copy.lineage == lineage} for rank in range(ranks)
        ]
        return sorted(set.intersection(*kept), reverse=True) if kept else []

    def kept(
        self, local_rank: int, step: int, lineage: int | None, what: CopyPart, offset: int, nbytes: int
    ) -> tuple[int, bytes] | None:
        """The size of the tensors or of the list of a rank's copy of this step and lineage, or with no lineage of its
        part of a checkpoint in the outbox, and some of its bytes; None where there is none."""
        copy = _copy(self.descriptor, local_rank, OUTBOX)
        if lineage is not None:
            found = _copies(self.descriptor, local_rank)
            copy = next((one for one in found if (one.step, one.lineage) == (step, lineage)), None)
        if copy is None or copy.step != step:
            return None
        place, size = _data_at(local_rank, copy.slot), copy.data_bytes
        if what == "list":
            place, size = _text_at(local_rank, copy.slot), copy.text_bytes
        wanted = min(nbytes, size - offset)
        return size, os.pread(self.descriptor, wanted, place + offset) if wanted > 0 else b""


class RankMemory:
    """A rank's end: a CopyStore that writes into the region of this local rank."""

    def __init__(self, descriptor: int, local_rank: int) -> None:
        self._file, self._own = descriptor, local_rank

    def reserve(self, slot: int, nbytes: int) -> None:
        """As in CopyStore."""
        if nbytes > _SLOT_BYTES - _TEXT_BYTES:
            raise OSError(f"a copy of {nbytes} bytes is larger than the {_SLOT_BYTES - _TEXT_BYTES} that a slot has")
        reserve_space(self._file, _data_at(self._own, slot), nbytes)

    def begin(self, slot: int) -> None:
        """As in CopyStore."""
        self._record(slot, _TORN, 0, 0, 0, 0)

    def write(self, slot: int, offset: int, data: memoryview) -> None:
        """As in CopyStore."""
        _write_all(self._file, data, _data_at(self._own, slot) + offset)

    def finish(self, slot: int, *, step: int, lineage: int, text: bytes, data_bytes: int) -> None:
        """As in CopyStore."""
        if len(text) > _TEXT_BYTES:
            raise OSError(f"a description of {len(text)} bytes is larger than the {_TEXT_BYTES} that a slot has")
        _write_all(self._file, memoryview(text), _text_at(self._own, slot))
        self._record(slot, _WHOLE, step, lineage, len(text), data_bytes)

    def release(self, slot: int, nbytes: int) -> None:
        """As in CopyStore."""
        self.begin(slot)
        with suppress(OSError), mmap.mmap(self._file, nbytes, offset=_data_at(self._own, slot)) as memory:
            memory.madvise(mmap.MADV_REMOVE)

    def copies(self, local_rank: int) -> Sequence[KeptCopy]:
        """As in CopyStore."""
        return _copies(self._file, local_rank)

    def text(self, local_rank: int, copy: KeptCopy) -> bytes:
        """As in CopyStore."""
        return os.pread(self._file, copy.text_bytes, _text_at(local_rank, copy.slot))

    def data(self, local_rank: int, copy: KeptCopy) -> memoryview:
        """As in CopyStore."""
        if copy.data_bytes == 0:
            return memoryview(bytearray())
        place = _data_at(local_rank, copy.slot)
        return memoryview(mmap.mmap(self._file, copy.data_bytes, access=mmap.ACCESS_COPY, offset=place))

    def _record(self, slot: int, mark: bytes, *numbers: int) -> None:
        record = _RECORD.pack(mark, *numbers)
        _write_all(self._file, memoryview(record + _SUM.pack(crc32(record))), _record_at(self._own, slot))


def _copies(file: int, local_rank: int) -> Sequence[KeptCopy]:
    found = [_copy(file, local_rank, slot) for slot in range(SLOTS)]
    return sorted((copy for copy in found if copy is not None), key=lambda copy: -copy.step)


def _copy(file: int, local_rank: int, slot: int) -> KeptCopy | None:
    record = os.pread(file, _RECORD.size + _SUM.size, _record_at(local_rank, slot))
    if len(record) < _RECORD.size + _SUM.size:
        return None
    mark, step, lineage, text_bytes, data_bytes = _RECORD.unpack_from(record)
    if mark != _WHOLE or _SUM.unpack_from(record, _RECORD.size)[0] != crc32(record[: _RECORD.size]):
        return None
    return KeptCopy(step=step, lineage=lineage, slot=slot, text_bytes=text_bytes, data_bytes=data_bytes)


def _record_at(local_rank: int, slot: int) -> int:
    return local_rank * _REGION_BYTES + slot * _RECORD_BYTES


def _text_at(local_rank: int, slot: int) -> int:
    return local_rank * _REGION_BYTES + _RECORDS_BYTES + slot * _SLOT_BYTES


def _data_at(local_rank: int, slot: int) -> int:
    return _text_at(local_rank, slot) + _TEXT_BYTES


def _write_all(file: int, data: memoryview, offset: int) -> None:
    data = data.cast("B")
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written
