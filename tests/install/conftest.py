"""A checkout to install, and package indexes on loopback with torch wheels of a few bytes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "install")]

BASE_PYTHON = getattr(sys, "_base_executable", sys.executable)
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "plait"
version = "0.1.0"
"""
BACKEND = '''
"""Builds plait's wheel with nothing but the standard library: no index is asked for setuptools."""
from wheels import write_wheel

def build_editable(folder, config_settings=None, metadata_directory=None):
    return write_wheel(folder, "plait", "0.1.0")
'''


def write_wheel(folder: str, name: str, version: str) -> str:
    """Write a wheel that holds one module; returns its file name."""
    info, file = f"{name}-{version}.dist-info", f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(Path(folder) / file, "w") as wheel:
        wheel.writestr(f"{name}.py", f"__version__ = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return file


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    """A copy of what `make install` reads, in a folder whose name has a space, beside the indexes that pip may ask."""

    folder: Path
    indexes: Path
    address: str

    def offer(self, index: str, *versions: str) -> None:
        """Put torch wheels in the index at `address`/`index`."""
        place = self.indexes / index / "torch"
        place.mkdir(parents=True)
        for version in versions:
            write_wheel(str(place), "torch", version)

    def make(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        kept = {
            key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "PYTHON", "TORCH", "MAKE"))
        }
        pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1", "PIP_INDEX_URL": f"{self.address}/pypi"}
        return subprocess.run(
            ["make", "--no-print-directory", *arguments],
            cwd=self.folder,
            env={**kept, **pip, "PYTORCH_INDEXES": f"{self.address}/pytorch", "PYTHON": BASE_PYTHON, **environment},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )

    def torch_version(self) -> str:
        program = [self.folder / ".venv/bin/python", "-c", "import torch, plait; print(torch.__version__)"]
        return subprocess.run(program, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    if subprocess.run([BASE_PYTHON, "-c", "import torch"], capture_output=True, check=False).returncode == 0:
        pytest.skip("this machine's Python has a torch, which would be kept")
    folder, indexes = tmp_path / "mein Ordner ü", tmp_path / "indexes"
    shutil.copytree(ROOT / "install", folder / "install", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "Makefile", folder)
    (folder / "constraints.txt").write_text("")
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "backend.py").write_text(BACKEND)
    _write_module_of(write_wheel, folder / "wheels.py")
    indexes.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(indexes)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield Checkout(folder=folder, indexes=indexes, address=f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def silent_address() -> Iterator[str]:
    """Of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def _write_module_of(function: object, file: Path) -> None:
    import inspect

    source = inspect.getsource(function)  # type: ignore[arg-type]
    file.write_text(f"import zipfile\nfrom pathlib import Path\n\n\n{source}")


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""
