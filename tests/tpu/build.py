"""`make test-tpu`: plait on the device "tpu" by Google's own backend for torch, on a machine without a TPU.

    python3.12 tests/tpu/build.py

An environment of its own is made once in .tpu-build (5 GB; a CUDA build of torch is the one that package indexes have
for every Python), with torch, torch_tpu and XLA's plugin for processors; without_chip/ brings the device up on it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENT = Path(os.environ.get("PLAIT_TPU_BUILD", ROOT / ".tpu-build"))
TORCH = ("torch==2.13.0", "torch_tpu==0.2.0", "xla-cpu-pjrt==0.0.1")
PACKAGES = (
    "numpy", "pydantic", "pyyaml", "typer", "rich", "tokenizers", "safetensors", "tomli-w", "jinja2", "pytest",
)  # fmt: skip
PYTHONS = ("python3.12", "python3.13", "python3.14")
"""Those that torch_tpu 0.2.0 has libraries for."""


def main(selected: list[str]) -> int:
    """Run the tests, those named on the command line if any."""
    python = environment()
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, HERE / "without_chip")))}
    tests = selected or [str(HERE / name) for name in ("tpu_steps.py", "tpu_layouts.py", "tpu_runs.py")]
    return subprocess.run([python, "-m", "pytest", *tests], env=variables, cwd=ROOT, check=False).returncode


def environment() -> Path:
    """The Python that has torch_tpu and the plugin."""
    python, record = ENVIRONMENT / "bin" / "python", ENVIRONMENT / "plait-installed"
    installed = "\n".join((*TORCH, *PACKAGES))
    if not record.exists() or record.read_text() != installed:
        own = sys.executable if sys.version_info[:2] >= (3, 12) else next(filter(_runs, PYTHONS), None)
        if own is None:
            sys.exit("torch_tpu needs Python 3.12 or newer: make test-tpu PYTHON=/path/to/python3.12")
        print(f"installing torch_tpu, and torch for it, into {ENVIRONMENT}: 3 GB to download, 5 GB on disk", flush=True)
        subprocess.check_call([own, "-m", "venv", "--clear", ENVIRONMENT])
        install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.check_call([*install, *TORCH])
        subprocess.check_call([*install, "--constraint", ROOT / "constraints.txt", *PACKAGES, *TORCH])
        record.write_text(installed)
    return python


def _runs(name: str) -> bool:
    """Whether it starts: pyenv has a command for every Python that it knows, and runs only those that are chosen."""
    found = shutil.which(name)
    return found is not None and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
