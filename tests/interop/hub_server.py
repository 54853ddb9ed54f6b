"""A small hub on loopback: it serves the folders below one folder by the paths of the Hugging Face hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def small_hub(home: Path) -> Iterator[tuple[str, list[str]]]:
    """The hub's address, and the paths that were asked for so far."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            asked.append(path)
            if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/[^/]+)?", path):
                self.model(found[1])
            elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+", path):
                self.tree(found[1])
            elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
                self.file(home / found[1] / found[2], body=body)
            else:
                self.missing()

        def model(self, name: str) -> None:
            files = [{"rfilename": one.name} for one in sorted((home / name).glob("*"))]
            if not files:
                return self.missing()
            return self.json({"id": name, "sha": COMMIT, "siblings": files})

        def tree(self, name: str) -> None:
            files = sorted((home / name).glob("*"))
            self.json([{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": "0" * 40} for f in files])

        def json(self, values: object) -> None:
            self.send(json.dumps(values).encode(), {"Content-Type": "application/json"}, body=True)

        def file(self, path: Path, *, body: bool) -> None:
            if not path.is_file():
                return self.missing()
            data = path.read_bytes()
            etag = sha256(data).hexdigest()
            return self.send(data, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, body=body)

        def missing(self) -> None:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def send(self, data: bytes, headers: dict[str, str], *, body: bool) -> None:
            self.send_response(200)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
