"""Make plait's environment for the Makefile: `.venv` with torch, plait and what it needs, in tested versions.

    python3 install/bootstrap.py [run | dev | bench]

Where `.venv` already holds what is asked, this ends at once. Before it downloads, it says what, and how much that is.
The syntax here is that of Python 3.6, so that whoever has an old Python reads a sentence and not a SyntaxError.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Optional

from torch_build import OLDEST_TORCH, Choice, choose_torch, is_new_enough, numbers, suits_gpus

OLDEST_PYTHON = (3, 11)
MEGABYTES = {"run": 100, "dev": 280, "bench": 280}
"""What there is to install, each with all that stands before it; the size of the download, without torch."""
SUITES = tuple(MEGABYTES)
ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
VENV_PYTHON = str(VENV / "bin" / "python")
RECORD = VENV / ".plait"
"""The suite that was installed last, and the fingerprint of what it was installed from."""
PIP = (VENV_PYTHON, "-m", "pip", "--disable-pip-version-check")


class SetupError(Exception):
    """A sentence for the user: what is wrong and what fixes it."""


def main() -> None:
    suite = sys.argv[1] if len(sys.argv) > 1 else "run"
    try:
        make_environment(suite)
    except SetupError as error:
        sys.exit(_complain(str(error)))
    except subprocess.CalledProcessError as error:
        sys.exit(_complain("this failed, and the lines above say why: " + " ".join(map(str, error.cmd))))
    except KeyboardInterrupt:
        sys.exit(_complain("stopped; give the same command to go on", code=130))


def make_environment(suite: str) -> None:
    """Bring `.venv` to what `suite` needs; does nothing where it is there already."""
    problem = venv_problem(VENV) if VENV.exists() else "there is none yet"
    if problem is None and _is_installed(suite):
        return
    if problem is not None:
        create_venv(problem)
    if not is_kept(torch_version(VENV_PYTHON)):
        install_torch()
    install_plait(suite)
    RECORD.write_text(_record(suite))


def _is_installed(suite: str) -> bool:
    enough = [_record(larger) for larger in SUITES[SUITES.index(suite) :]]
    return RECORD.exists() and RECORD.read_text() in enough


def _record(suite: str) -> str:
    files = (ROOT / "pyproject.toml", ROOT / "constraints.txt", *sorted(Path(__file__).parent.glob("*.py")))
    return suite + " " + hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


# .venv and its Python.


def venv_problem(venv: Path) -> Optional[str]:
    """Why an environment cannot be used as it is; None where it can."""
    config = _venv_config(venv)
    made = re.search(r" -m venv (?:--\S+ )*(.+)", config.get("command", ""))
    if made and Path(made.group(1)).resolve() != venv.resolve():
        return f"the one here was made in another folder, {Path(made.group(1)).parent}"
    found = _answer([str(venv / "bin" / "python"), "-c", "import sys, pip; print('%d.%d' % sys.version_info[:2])"])
    if found is None:
        return "the one here does not run, or has no pip"
    made_for = config.get("version", config.get("version_info", found))
    if numbers(made_for)[:2] != numbers(found):
        return f"the one here was made for Python {made_for}, and its Python is now {found}"
    if numbers(found) < OLDEST_PYTHON:
        return f"the one here is of Python {found}"
    if _is_python_named() and numbers(found) != sys.version_info[:2]:
        return f"the one here is of Python {found}, and PYTHON names another"
    return None


def _venv_config(venv: Path) -> "dict[str, str]":
    file = venv / "pyvenv.cfg"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {key.strip(): value.strip() for key, _, value in (line.partition("=") for line in lines)}


def _is_python_named() -> bool:
    """Whether the user chose the Python that runs this, as in `make PYTHON=python3.12 train`."""
    return os.environ.get("PYTHON_ORIGIN", "file") != "file"


def create_venv(reason: str) -> None:
    """Make `.venv` again; a torch that the Python outside has, and that is new enough and can use the GPUs, is kept."""
    python = getattr(sys, "_base_executable", None) or sys.executable  # not .venv's own, where that is activated
    check_python(sys.version_info[:3], python)
    if importlib.util.find_spec("ensurepip") is None:
        package = "python{}.{}-venv".format(*sys.version_info)
        raise SetupError(
            f"{python} cannot make an environment without a package that Debian and Ubuntu keep apart: "
            f"apt install {package} (as root), then give the same command again"
        )
    torch = torch_version(python)
    kept = ["--system-site-packages"] if is_kept(torch) else []
    _say(f"making .venv: {reason}" + (f"; it uses torch {torch} of {python}" if kept else ""))
    subprocess.check_call([python, "-m", "venv", "--clear", *kept, str(VENV)])


def check_python(version: "tuple[int, ...]", path: str) -> None:
    """Raises SetupError for a Python that is too old; names one that would do, where there is one."""
    if version >= OLDEST_PYTHON:
        return
    names = [f"python3.{minor}" for minor in range(19, OLDEST_PYTHON[1] - 1, -1)]
    newer = next((name for name in names if _answer([name, "--version"])), None)
    fix = f"{newer} is here" if newer else "install one, then name it"
    raise SetupError(
        "plait needs Python {}.{} or newer, and {} is Python {}.{}.{}; ".format(*OLDEST_PYTHON, path, *version)
        + f"{fix}: make PYTHON={newer or 'python3.12'} train"
    )


# torch.


def torch_version(python: str) -> Optional[str]:
    """Version of the torch that a Python can import; None where there is none."""
    return _answer([python, "-c", "import torch; print(torch.__version__)"])


def is_kept(torch: Optional[str]) -> bool:
    """Whether a torch that is here already will do."""
    return torch is not None and is_new_enough(torch) and suits_gpus(torch, driver_version(), gpu_capabilities())


def install_torch() -> None:
    """torch alone from its index, then NVIDIA's libraries from pip's own; pip shows how far each file is."""
    own_indexes = os.environ.get("PYTORCH_INDEXES", "https://download.pytorch.org/whl")  # or a mirror of them
    named = os.environ.get("TORCH_INDEX", "")
    choice = choose_torch(index_versions, driver_version(), own_indexes, named, gpu_capabilities())
    if choice is None:
        raise SetupError(
            "no package index here has torch {}.{} or newer for this Python; ".format(*OLDEST_TORCH)
            + "make TORCH_INDEX=URL train names one that has"
        )
    _announce(choice)
    index = ["--index-url", choice.address] if choice.address else []
    torch = f"torch==={choice.version}"  # three equal signs: `==2.13.0` would take 2.13.0+cpu as well
    subprocess.check_call([*PIP, "install", "--no-deps", *index, torch])
    if choice.has_cuda:
        subprocess.check_call([*PIP, "install", *_tested_versions(), torch])


def _announce(choice: Choice) -> None:
    kind, size = ("with CUDA", "3 GB, twice that on disk") if choice.has_cuda else ("for the processor", "200 MB")
    _say(f"{choice.reason}; installing torch {choice.version}, {kind}, from {choice.address or 'pip'}")
    _say(f"this downloads about {size}; Ctrl-C stops it, and make TORCH_INDEX=URL train takes torch from elsewhere")


def driver_version() -> Optional[str]:
    """Version of the NVIDIA driver, such as 580.65.06; None without one."""
    file = Path("/proc/driver/nvidia/version")
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", file.read_text()) if file.exists() else None
    if found:
        return found.group(1)
    answer = _answer(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return answer.splitlines()[0] if answer else None


def gpu_capabilities() -> "list[tuple[int, int]]":
    """Compute capabilities of the GPUs that nvidia-smi lists, such as (9, 0); none where it does not tell."""
    answer = _answer(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"])
    return [(int(major), int(minor)) for major, minor in re.findall(r"^(\d+)\.(\d+)\s*$", answer or "", re.MULTILINE)]


def index_versions(index: Optional[str]) -> "list[str]":
    """All versions of torch for this Python in a package index, newest first; empty where it does not answer.

    An index that is named is asked once, for a few seconds: many machines reach a mirror of PyPI and nothing else.
    """
    brief = ["--index-url", index, "--retries", "0", "--timeout", "5"] if index else []
    answer = _answer([*PIP, "index", "versions", "torch", *brief], timeout_s=15 if index else None)
    found = re.search(r"Available versions: (.+)", answer or "")
    return found.group(1).split(", ") if found else []


# plait and the other packages.


def install_plait(suite: str) -> None:
    """plait, editable, with what it needs: one line for each file that is downloaded."""
    _say(f"installing plait and the packages that it needs: up to {MEGABYTES[suite]} MB to download")
    command = [*PIP, "install", *_tested_versions(), "--editable", str(ROOT) if suite == "run" else f"{ROOT}[{suite}]"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, errors="replace") as process:
        for line in process.stdout or ():
            if line.strip().startswith("Downloading"):
                print("  " + line.strip(), flush=True)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def _tested_versions() -> "list[str]":
    """The lock file for pip; none where torch comes from outside, with versions that were tested with that one."""
    kept = _venv_config(VENV).get("include-system-site-packages") == "true"
    return [] if kept else ["--constraint", str(ROOT / "constraints.txt")]


def _answer(command: "list[str]", timeout_s: Optional[int] = None) -> Optional[str]:
    """What a program prints; None where it is missing, fails or takes too long."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None


def _say(line: str) -> None:
    encoding = sys.stdout.encoding  # a folder's name may have letters that it has not
    print(f"plait: {line}".encode(encoding, "replace").decode(encoding), flush=True)


def _complain(sentence: str, code: int = 2) -> int:
    sys.stderr.write(f"plait: {sentence}\n")
    return code


if __name__ == "__main__":
    main()
