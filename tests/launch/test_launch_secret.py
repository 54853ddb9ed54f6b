"""The secret that people type, and the addresses that they choose."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from plait.errors import PlaitError
from plait.hosts.handshake import SECRET_VARIABLE, is_private, new_secret, parse_secret, read_secret
from plait.launch.network import interface_of, local_addresses


def test_a_secret_is_fresh_long_and_typed_in_groups():
    secrets = {new_secret().text for _ in range(100)}
    assert len(secrets) == 100
    for text in secrets:
        assert [len(group) for group in text.split("-")] == [4] * 7
        assert not set(text) & set("ILOU")  # 32 signs of 5 bits


def test_it_is_read_back_however_it_was_typed():
    secret = new_secret()
    typed = secret.text.lower().replace("-", " ").replace("0", "o").replace("1", "l") + "\n"
    assert parse_secret(typed) == secret
    assert parse_secret(secret.text.replace("-", "")).key == secret.key


@pytest.mark.parametrize("typed", ["", "hunter2", "A" * 27, "A" * 29, "U" * 28, "é" * 28])
def test_what_is_no_secret_is_refused_without_showing_it(typed: str):
    with pytest.raises(PlaitError, match="the secret has 7 groups of 4 letters and digits") as caught:
        parse_secret(typed)
    assert not typed or typed not in str(caught.value)


def test_it_is_shown_by_nothing_but_its_text():
    secret = new_secret()
    for shown in (repr(secret), str(secret), f"{[secret]}"):
        assert "Secret(…)" in shown
        assert secret.text[:4] not in shown


def test_it_comes_from_a_file_that_nobody_else_can_read(tmp_path: Path):
    secret, file = new_secret(), tmp_path / "secret"
    file.write_text(secret.text + "\n")
    file.chmod(0o600)
    assert read_secret(str(file)) == secret
    file.chmod(0o640)
    with pytest.raises(PlaitError, match=f"can be read by other users; make it your own: chmod 600 {file}"):
        read_secret(str(file))
    with pytest.raises(PlaitError, match=r"none cannot be read \(No such file or directory\)"):
        read_secret(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("owner", "group", "mode", "private"),
    [
        (1000, 1000, 0o600, True),
        (1000, 1000, 0o640, False),
        (1001, 1000, 0o600, False),
        (0, 1000, 0o440, True),
        (0, 1000, 0o460, False),
        (0, 1000, 0o444, False),
        (0, 100, 0o440, False),
    ],
)
def test_a_file_of_root_may_be_for_a_group_of_the_users(owner: int, group: int, mode: int, private: bool):
    """As Kubernetes mounts a secret for a pod's group."""
    about = os.stat_result((0o100000 | mode, 1, 1, 1, owner, group, 30, 0, 0, 0))
    assert is_private(about, user=1000, groups=(1000, 4)) is private


def test_it_comes_from_the_environment_and_is_not_passed_on(monkeypatch):
    secret = new_secret()
    monkeypatch.setenv(SECRET_VARIABLE, secret.text)
    assert read_secret(None) == secret
    assert SECRET_VARIABLE not in os.environ


def test_without_a_terminal_nobody_is_asked(monkeypatch):
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO("words"))
    with pytest.raises(
        PlaitError, match=f"no terminal to ask for the secret; give it by --secret-file or in {SECRET_VARIABLE}"
    ):
        read_secret(None)


def test_every_address_has_its_interface():
    known = local_addresses()
    assert known["127.0.0.1"] == "lo"
    assert {interface_of(address) for address in known} == set(known.values())
    assert (interface_of("127.0.0.9"), interface_of("::1")) == ("lo", "lo")
    shown = subprocess.run(["hostname", "--all-ip-addresses"], capture_output=True, text=True, check=False).stdout
    assert set(shown.split()) <= set(known)


@pytest.mark.parametrize("address", ["203.0.113.7", "localhost", "", "10.0.0.256"])
def test_what_is_no_address_of_this_machine_is_told(address: str):
    with pytest.raises(PlaitError, match=r"(choose .*\d|connect this machine to a network first)$"):
        interface_of(address)
