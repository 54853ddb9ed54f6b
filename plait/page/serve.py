"""The page's server on this machine: its socket, its thread, and the printed address."""

from __future__ import annotations

import os
import secrets
import shlex
import socket
import threading
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from getpass import getuser
from pathlib import Path
from typing import Literal

from plait.errors import Interrupted, PlaitError, StopSignal, installing
from plait.page.watched_runs import WatchedRuns
from plait.run_folder import find_run
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

LOOPBACK = "127.0.0.1"
FIRST_PORT = 8427
PORTS_TRIED = 100
Browser = Literal["opened", "not opened"]
Write = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAddress:
    """The address of a page: on this machine's own interface, for anybody with the token."""

    port: int
    token: str

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}/?token={self.token}"

    def lines(self, environment: Mapping[str, str] = os.environ) -> list[str]:
        """The printed lines: the address; over SSH also the command that makes it reachable from the user's own
        machine."""
        lines = [f"page     {self.url}"]
        connection = environment.get("SSH_CONNECTION", "").split()
        if len(connection) == 4:
            to = f"{environment.get('USER') or getuser()}@{connection[2]}"
            port = [] if connection[3] == "22" else ["-p", connection[3]]
            command = shlex.join(["ssh", "-N", *port, "-L", f"{self.port}:{LOOPBACK}:{self.port}", to])
            lines.append(f"         first, on your own machine: {command}")
        return lines


@contextmanager
def page_server(
    names: Sequence[str], working: WorkingFolder = CURRENT_FOLDER, *, port: int | None = None
) -> Iterator[PageAddress]:
    """Serve the page from a thread while the block runs; `names` are shown first: runs by name, or by folder.

    Raises PlaitError if the page's packages are missing or the port is taken. A name without a folder may be that of a
    future run.
    """
    try:
        import uvicorn

        from plait.page.app import page_app
    except ImportError as error:
        raise PlaitError(f"the live page needs {error.name}", f"install it: {installing('plait[page]')}") from None
    runs = WatchedRuns(working, [path for name in names if (path := _elsewhere(name, working))])
    with _listening(port) as listener:
        address = PageAddress(port=listener.getsockname()[1], token=secrets.token_urlsafe(24))
        app = page_app(runs, address.token, [name.rstrip("/").rpartition("/")[2] for name in names])
        server = uvicorn.Server(
            uvicorn.Config(
                app,  # type: ignore[arg-type]  # an ASGI application, of types of our own
                log_config=None,
                log_level="critical",
                access_log=False,  # the token is in the addresses
                lifespan="off",
                ws="none",
                http="h11",
                loop="asyncio",
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )
        thread = threading.Thread(target=server.run, args=([listener],), name="page", daemon=True)
        thread.start()
        try:
            yield address
        finally:
            server.should_exit = True
            thread.join(timeout=5)
            runs.close()


def watch(
    names: Sequence[str],
    working: WorkingFolder = CURRENT_FOLDER,
    *,
    port: int | None = None,
    browser: Browser = "not opened",
    write: Write,
) -> StopSignal:
    """Serve the page until a signal arrives, and return which. Raises PlaitError if a run does not exist."""
    for name in names:
        find_run(name, working)
    try:
        with page_server(names, working, port=port) as address:
            write("\n".join([*address.lines(), "         Ctrl-C ends it"]) + "\n")
            if browser == "opened":
                open_browser(address.url)
            threading.Event().wait()
    except Interrupted as stopped:
        return stopped.signal
    raise AssertionError("nothing but a signal ends the wait")


def may_open_browser(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a browser window would be visible here: not over SSH, and not without a screen."""
    if "SSH_CONNECTION" in environment:
        return False
    return os.uname().sysname == "Darwin" or bool(environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY"))


def open_browser(url: str) -> None:
    """Show the page in the user's browser; if there is none, the printed address remains."""
    try:
        webbrowser.open(url)
    except (webbrowser.Error, OSError):
        return


def _elsewhere(name: str, working: WorkingFolder) -> Path | None:
    """The folder of a run that is given by its folder, outside the working folder."""
    path = (working.path / name).resolve()
    return path if path.is_dir() and path.parent != working.runs.resolve() else None


def _listening(port: int | None) -> socket.socket:
    """A socket listening on a port, or on the first free one of a hundred; raises PlaitError."""
    if port is not None:
        try:
            return _bound(port)
        except OSError as error:
            raise PlaitError(
                f"port {port} cannot be used ({error.strerror})",
                "choose another --port, or omit it",
            ) from None
    for one in range(FIRST_PORT, FIRST_PORT + PORTS_TRIED):
        try:
            return _bound(one)
        except OSError:
            continue
    return _bound(0)


def _bound(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        listener.listen(64)
    except OSError:
        listener.close()
        raise
    return listener
