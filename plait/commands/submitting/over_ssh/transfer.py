"""Files to and from machines by ssh: only what is not there yet, by its hash, and as streams, however large."""

from __future__ import annotations

import hashlib
import io
import shlex
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from plait.commands.submitting.tools import complaint_text, require_tool, tool_answer
from plait.errors import PlaitError

SSH_WORDS = (
    "ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15",
    "-o", "ServerAliveCountMax=4",
)  # fmt: skip
"""A machine that does not answer for a minute is lost: a connection that only stands still would be waited for."""


def on_machine(machine: str, command: str, *, stdin: str = "", within_s: float = 120.0) -> str:
    """What a shell command answers on a machine; raises PlaitError with the mend."""
    require_tool("ssh", "install openssh-client, or add --dry-run to see what would be sent")
    return tool_answer([*SSH_WORDS, machine, command], stdin=stdin, about=machine, within_s=within_s)


def send_files(
    machine: str, folder: str, files: Sequence[Path], texts: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Send files that a machine does not have yet in that folder, and small texts under names of their own."""
    names = shlex.join([path.name for path in files])
    there = on_machine(machine, f"cd {folder} && sha256sum {names} 2>/dev/null || true")
    known = {line.split(maxsplit=1)[1].lstrip("*"): line.split()[0] for line in there.splitlines() if " " in line}
    fresh = [path for path in files if known.get(path.name) != _sha256_of(path)]
    if not fresh and not texts:
        return
    command = [*SSH_WORDS, machine, f"mkdir -p {folder} && tar -x --no-same-owner -C {folder}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stderr is not None
        try:
            with process.stdin as pipe, tarfile.open(fileobj=pipe, mode="w|") as archive:
                for path in fresh:
                    archive.add(path.resolve(), arcname=path.name, recursive=False)
                for name, text in texts.items():
                    entry = tarfile.TarInfo(name)
                    entry.size = len(text.encode())
                    archive.addfile(entry, io.BytesIO(text.encode()))
        except BrokenPipeError:
            pass  # what the other end says of it follows
        complaint = process.stderr.read().decode(errors="replace")
    if process.returncode:
        raise PlaitError(f"{machine} does not take files: {complaint_text(complaint, 'ssh', process.returncode)}")


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def bring_folder(machine: str, folder: str, inside: Path, target: Path) -> None:
    """Copy `inside` of a machine's folder into `target` here; raises PlaitError where it is not there."""
    command = [*SSH_WORDS, machine, shlex.join(archive_command(folder, inside))]
    unpack_answer(command, target, f"{machine} does not give {inside}")


def archive_command(folder: str, inside: Path) -> list[str]:
    """A program that prints `inside` of a folder as a tar archive. Runs go on meanwhile: tar ends with 1 where a file
    grew or was removed as it was read, and what it has read is whole nevertheless."""
    return ["sh", "-c", 'tar -c -C "$0" "$1" || [ $? = 1 ]', folder, str(inside)]


def unpack_answer(command: Sequence[str], target: Path, refusal: str) -> None:
    """Unpack the tar archive that a program prints into `target`; raises PlaitError that begins with `refusal`."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                archive.extractall(target, filter="data")
        except tarfile.ReadError:
            pass  # an empty stream: what the other end says of it follows
        complaint = process.stderr.read().decode(errors="replace")
    if process.returncode:
        raise PlaitError(f"{refusal}: {complaint_text(complaint, 'tar', process.returncode)}")
