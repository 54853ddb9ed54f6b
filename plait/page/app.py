"""The page as a web application: access control, and its few addresses."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from hmac import compare_digest
from html import escape
from importlib.resources import files
from math import isfinite
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from plait.page.watched_runs import WatchedRuns
from plait.planner.report.page import shared_style

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",  # the address contains the token
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_LOCAL_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.ASCII)
_STEP = re.compile(r"\d{1,15}", re.ASCII)
_Scope = dict[str, Any]
_Receive = Callable[[], Awaitable[Any]]
_Send = Callable[[Any], Awaitable[None]]


def page_app(runs: WatchedRuns, token: str, shown: Sequence[str] = ()) -> Guarded:
    """The application; `shown` are the names of the runs that the page shows first."""
    answers: dict[str, Callable[[Request], Response]] = {
        "/": lambda request: _text(_page(token, shown), "text/html"),
        "/watch.js": lambda request: _text(_file("watch.js"), "text/javascript"),
        "/watch.css": lambda request: _text(shared_style() + _file("watch.css"), "text/css"),
        "/icon.svg": lambda request: _text(_file("icon.svg"), "image/svg+xml"),
        "/api/runs": lambda request: _json(runs.list()),
        "/api/runs/{name}": lambda request: _run(runs, request),
    }
    routes = [Route(path, answer, methods=["GET"]) for path, answer in answers.items()]
    return Guarded(Starlette(routes=routes), token)


class Guarded:
    """An application that answers only requests that have the token, use this machine's own name, and come from its own
    page.

    A page of another origin that points its name here (DNS rebinding) still sends its own name as Host. A refused
    request learns nothing, not even which addresses exist.
    """

    def __init__(self, inner: Starlette, token: str) -> None:
        self._inner, self._token = inner, token.encode()

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope)
        refusal = _refusal(request, self._token)
        if refusal is not None:
            await refusal(scope, receive, send)
            return

        async def send_guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(key.lower().encode(), value.encode()) for key, value in HEADERS.items()]
            await send(message)

        await self._inner(scope, receive, send_guarded)


def _refusal(request: Request, token: bytes) -> Response | None:
    if not _LOCAL_HOST.fullmatch(request.headers.get("host", "")):
        return Response("plait answers to 127.0.0.1 and localhost only.\n", 421, HEADERS, "text/plain")
    given = request.query_params.get("token", "") or request.headers.get("authorization", "").removeprefix("Bearer ")
    if not compare_digest(given.encode("utf-8", "replace"), token):
        return Response("This page needs the whole address that plait printed.\n", 403, HEADERS, "text/plain")
    # Browsers say where a request comes from; following a link does not count as a page's request.
    site, mode = request.headers.get("sec-fetch-site", "none"), request.headers.get("sec-fetch-mode", "")
    if site not in ("same-origin", "none") and not (mode == "navigate" and request.url.path == "/"):
        return Response("This page answers no other page.\n", 403, HEADERS, "text/plain")
    return None


def _run(runs: WatchedRuns, request: Request) -> Response:
    after = request.query_params.get("after", "0")
    if not _STEP.fullmatch(after):
        return _json({"error": "after is a number of steps"}, 400)
    view = runs.view(request.path_params["name"], int(after))
    return _json({"error": "there is no such run; it may have been deleted"}, 404) if view is None else _json(view)


def _page(token: str, shown: Sequence[str]) -> str:
    """The page's HTML; the token is in the addresses of what it loads, as in its own."""
    runs = escape(json.dumps(list(shown)))
    return _file("watch.html").replace("{{token}}", escape(token)).replace("{{runs}}", runs)


def _file(name: str) -> str:
    return (files("plait.page") / "files" / name).read_text(encoding="utf-8")


def _text(text: str, kind: str) -> Response:
    return Response(text, media_type=kind)


def _json(value: Any, status: int = 200) -> Response:
    return Response(json.dumps(_finite(value), allow_nan=False, default=str), status, media_type="application/json")


def _finite(value: Any) -> Any:
    """The value with null for every infinity or NaN, which JSON cannot express."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(one) for one in value]
    return value
