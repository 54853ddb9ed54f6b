"""Machines for ssh: network namespaces of this one, each with its own sshd, host key, home and address on one
bridge."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.end_to_end.command import wait_until

SSHD = "/usr/sbin/sshd"
PORT = 22
BRIDGE = "plaitssh"
LAPTOP = "10.37.0.254"
ADDRESSES: Mapping[str, str] = {"ann": "10.37.0.1", "bob": "10.37.0.2", "cy": "10.37.0.3"}


class Machines:
    """Use as a context manager; `bin` has an ssh that knows the machines' names, as a person's configuration does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "bin").mkdir(parents=True)

    def __enter__(self) -> Machines:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for name in ADDRESSES:
            self.kill(name)
            _ip("netns", "del", _namespace(name), check=False)
        _ip("link", "del", BRIDGE, check=False)

    @property
    def path(self) -> str:
        """PATH with that ssh."""
        return f"{self.folder}/bin:{os.environ['PATH']}"

    def home(self, name: str) -> Path:
        return self.folder / name

    def start(self, name: str) -> None:
        """Boot a machine: blocks until its sshd listens."""
        command = [
            "ip",
            "netns",
            "exec",
            _namespace(name),
            SSHD,
            "-D",
            "-e",
            "-f",
            str(self._file(name, "sshd_config")),
        ]
        self._daemons[name] = subprocess.Popen(command, stderr=self._file(name, "sshd.log").open("ab"))
        wait_until(lambda: _listens(ADDRESSES[name]), within_s=30)

    def kill(self, name: str) -> None:
        """Take a machine's power: everything in its namespace ends at once."""
        for pid in _ip("netns", "pids", _namespace(name), check=False).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if daemon := self._daemons.pop(name, None):
            daemon.wait()

    def install_anew(self, name: str) -> None:
        """Give a machine another host key, as an installation does."""
        self.kill(name)
        self._make_key(name, "host_key")
        self.start(name)

    def known(self, *, again: bool = False) -> None:
        """Have the laptop know all host keys as they are now; `again` forgets earlier ones, as ssh-keygen -R does."""
        lines = [f"{ADDRESSES[name]} {self._file(name, 'host_key.pub').read_text()}" for name in ADDRESSES]
        mode = "w" if again else "a"
        with (self.folder / "known_hosts").open(mode) as file:
            file.writelines(line if line.endswith("\n") else f"{line}\n" for line in lines)

    def _make(self) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)
        self._make_key("", "client_key")
        _ip("link", "add", BRIDGE, "type", "bridge")
        _ip("addr", "add", f"{LAPTOP}/24", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        for number, (name, address) in enumerate(ADDRESSES.items()):
            self.home(name).mkdir()
            self._make_key(name, "host_key")
            self._configure(name, address)
            space, outer, inner = _namespace(name), f"plaitssh{number}", f"plaitsshp{number}"
            _ip("netns", "add", space)
            _ip("link", "add", outer, "type", "veth", "peer", "name", inner)
            _ip("link", "set", outer, "master", BRIDGE, "up")
            _ip("link", "set", inner, "netns", space, "name", "eth0")
            for words in (("addr", "add", f"{address}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
                _ip("-netns", space, *words)
            _ip("-netns", space, "link", "set", "lo", "up")
            self.start(name)
        self.known(again=True)
        client = [f"Host {name}\n    HostName {address}" for name, address in ADDRESSES.items()]
        client.append(
            f"Host *\n    IdentityFile {self.folder}/client_key\n    UserKnownHostsFile {self.folder}/known_hosts"
        )
        (self.folder / "ssh_config").write_text("\n".join(client) + "\n")
        program = self.folder / "bin" / "ssh"
        program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.folder}/ssh_config "$@"\n')
        program.chmod(0o755)

    def _configure(self, name: str, address: str) -> None:
        home = self.home(name)
        shell = f'cd {home}; export HOME={home}; exec sh -c "$SSH_ORIGINAL_COMMAND"'
        lines = [
            f"ListenAddress {address}:{PORT}",
            f"HostKey {self._file(name, 'host_key')}",
            f"AuthorizedKeysFile {self.folder}/client_key.pub",
            f"PidFile {self._file(name, 'sshd.pid')}",
            "StrictModes no",
            "UsePAM no",
            "PermitRootLogin yes",
            "PasswordAuthentication no",
            f"ForceCommand {shell}",
        ]
        self._file(name, "sshd_config").write_text("\n".join(lines) + "\n")

    def _file(self, name: str, what: str) -> Path:
        """A machine's own file, beside its home."""
        return self.folder / (f"{name}.{what}" if name else what)

    def _make_key(self, name: str, what: str) -> None:
        file = self._file(name, what)
        for old in (file, file.with_name(f"{file.name}.pub")):
            old.unlink(missing_ok=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(file)], check=True)


def _namespace(name: str) -> str:
    return f"plaitssh-{name}"


def _ip(*words: str, check: bool = True) -> str:
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True).stdout


def _listens(address: str) -> bool:
    with socket.socket() as one:
        one.settimeout(1)
        return one.connect_ex((address, PORT)) == 0
