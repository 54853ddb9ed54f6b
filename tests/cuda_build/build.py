"""`make test-cuda-build`: plait on CUDA builds of torch, on a machine without a card.

    python3 tests/cuda_build/build.py 2.11.0 2.13.0 2.14.1

For each version an environment of its own is made (some 6 GB, kept for the next time), torch and what plait needs are
installed, described_driver.c is compiled as the driver of one GPU, and check.py and kernels.py run with it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / ".cuda-builds"
PACKAGES = ("numpy", "safetensors", "pydantic", "tokenizers", "tomli-w", "rich", "typer", "tensorboard")
LIBRARIES = ("libtorch_cuda.so", "libc10_cuda.so", "libtorch_python.so", "libcaffe2_nvrtc.so")
CALLED = re.compile(r"^\s+U (cu(?:da)?[A-Z]\w*)", re.MULTILINE)
DEFINED = re.compile(r"^(?:cudaError_t|int) (cu\w+)\(", re.MULTILINE)


def main(versions: list[str]) -> int:
    failed = [version for version in versions if not passes(version)]
    print(f"{len(versions) - len(failed)} passed, {len(failed)} failed" + f": {', '.join(failed)}" * bool(failed))
    return len(failed)


def passes(version: str) -> bool:
    """Install this torch, unless it is there, and run both scripts with it."""
    python = environment(version)
    driver = described_driver(python)
    variables = {**os.environ, "LD_PRELOAD": str(driver), "PYTHONPATH": str(ROOT), "CUDA_MODULE_LOADING": "LAZY"}
    passed = True
    for script in ("check.py", "kernels.py"):
        print(f"torch {version}: running {script}", flush=True)
        passed &= subprocess.run([python, HERE / script], env=variables, cwd=ROOT, check=False).returncode == 0
    return passed


def environment(version: str) -> Path:
    """The Python that has this torch, with CUDA."""
    folder = ENVIRONMENTS / version
    python, record = folder / "bin" / "python", folder / "plait-installed"
    if not record.exists():
        print(
            f"torch {version}: installing it with CUDA into {folder}: about 3 GB to download, 6 GB on disk", flush=True
        )
        subprocess.check_call([sys.executable, "-m", "venv", "--clear", folder])
        install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.check_call([*install, f"torch==={version}"])  # three equal signs: not 2.13.0+cpu
        subprocess.check_call([*install, "--constraint", ROOT / "constraints.txt", *PACKAGES, f"torch==={version}"])
        record.write_text(version)
    return python


def described_driver(python: Path) -> Path:
    """Compile described_driver.c for an environment's torch."""
    packages = next((python.parents[1] / "lib").glob("python3.*/site-packages"))
    source = (HERE / "described_driver.c").read_text()
    asked = {name for library in LIBRARIES for name in CALLED.findall(symbols(packages / "torch" / "lib" / library))}
    folder = python.parents[1] / "described-driver"
    folder.mkdir(exist_ok=True)
    nothing = sorted(asked - set(DEFINED.findall(source)))
    (folder / "nothing.c").write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in nothing))
    (headers,) = packages.glob("nvidia/cu*/include/cuda_runtime_api.h")
    rest = packages / "triton" / "backends" / "nvidia" / "include"  # some that the runtime's headers include
    made, flags = folder / "libcuda.so.1", ["-O1", "-w", "-fno-builtin", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    flags += [f"-I{place}" for place in (headers.parent, rest)]
    subprocess.check_call(["gcc", *flags, "-o", made, HERE / "described_driver.c", folder / "nothing.c"])
    return made


def symbols(library: Path) -> str:
    """What a library calls, as `nm` lists it, without the versions of the names."""
    listed = subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True).stdout
    return re.sub(r"@\S+", "", listed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
