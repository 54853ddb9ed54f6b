"""The page's server: where it listens, what it prints, and how it ends."""

from __future__ import annotations

import builtins
import socket
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest

from plait.errors import PlaitError
from plait.page.serve import FIRST_PORT, PageAddress, may_open_browser, page_server, watch
from plait.working_folder import WorkingFolder
from tests.run_files.written_runs import written_run

ADDRESS = PageAddress(port=8427, token="secret")


@pytest.fixture
def working(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkingFolder:
    monkeypatch.chdir(tmp_path)
    return WorkingFolder()


def test_it_answers_with_its_token_on_this_machine_only_and_ends(working: WorkingFolder) -> None:
    written_run(working, "first")
    with page_server(["first"], working) as address:
        assert address.url.startswith("http://127.0.0.1:") and len(address.token) >= 32
        with urlopen(address.url, timeout=10) as answer:
            assert answer.status == 200 and b"&quot;first&quot;" in answer.read()
        with pytest.raises(HTTPError, match="403"):
            urlopen(f"http://127.0.0.1:{address.port}/", timeout=10)
        listening = Path("/proc/net/tcp").read_text()
        assert f"0100007F:{address.port:04X}" in listening and f"00000000:{address.port:04X}" not in listening
        port = address.port
    with pytest.raises(URLError):
        urlopen(f"http://127.0.0.1:{port}/", timeout=10)


@pytest.mark.parametrize(
    "sent", [b"\0\xff\r\n\r\n", b"GET / HTTP/1.0\r\n\r\n", b"GET /" + b"a" * 100_000, b"GET / HTTP/1.1\r\nHost: x"]
)
def test_what_is_no_request_prints_nothing_and_ends_nothing(
    working: WorkingFolder, capfd: pytest.CaptureFixture[str], sent: bytes
) -> None:
    with page_server([], working) as address:
        with socket.create_connection(("127.0.0.1", address.port), timeout=10) as stranger:
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
            answer = stranger.makefile("rb").read()
        assert b" 200 " not in answer
        with urlopen(address.url, timeout=10) as page:
            assert page.status == 200
    assert capfd.readouterr() == ("", "")


def test_each_page_has_a_port_and_a_token_of_its_own(working: WorkingFolder) -> None:
    with page_server([], working) as one, page_server([], working) as two:
        assert one.port != two.port and one.token != two.token
        assert one.port >= FIRST_PORT
        with pytest.raises(HTTPError, match="403"):
            urlopen(f"http://127.0.0.1:{two.port}/?token={one.token}", timeout=10)


def test_a_port_that_is_taken_is_a_sentence(working: WorkingFolder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(PlaitError, match=rf"port {port} cannot be used \(Address already in use\); choose another"),
            page_server([], working, port=port),
        ):
            pass
    with page_server([], working, port=port) as address:
        assert address.port == port


def test_without_its_packages_it_says_what_to_install(working: WorkingFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "uvicorn":
            raise ModuleNotFoundError("no uvicorn", name="uvicorn")
        return usual(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with (
        pytest.raises(PlaitError, match=r"the live page needs uvicorn; install it: .*'plait\[page\]'$"),
        page_server([]),
    ):
        pass


def test_a_run_that_is_not_there_is_a_sentence(working: WorkingFolder) -> None:
    written_run(working, "first")
    with pytest.raises(PlaitError, match=r'there is no run "firts" in .*; the runs there: first'):
        watch(["firts"], working, write=lambda text: None)


def test_one_address_is_printed_and_over_ssh_how_to_reach_it() -> None:
    assert ADDRESS.lines({}) == ["page     http://127.0.0.1:8427/?token=secret"]
    lines = ADDRESS.lines({"SSH_CONNECTION": "10.0.0.9 50022 10.0.0.5 22", "USER": "ada"})
    assert lines[0] == "page     http://127.0.0.1:8427/?token=secret"
    assert lines[1:] == ["         first, on your own machine: ssh -N -L 8427:127.0.0.1:8427 ada@10.0.0.5"]
    other = ADDRESS.lines({"SSH_CONNECTION": "10.0.0.9 50022 10.0.0.5 2222", "USER": "ada"})[1]
    assert other.endswith("ssh -N -p 2222 -L 8427:127.0.0.1:8427 ada@10.0.0.5")
    assert ADDRESS.lines({"SSH_CONNECTION": "what"}) == lines[:1]


def test_a_browser_is_opened_where_it_would_be_seen() -> None:
    assert may_open_browser({"DISPLAY": ":0"}) and may_open_browser({"WAYLAND_DISPLAY": "wayland-0"})
    assert not may_open_browser({}) and not may_open_browser({"DISPLAY": ":10", "SSH_CONNECTION": "a 1 b 22"})
