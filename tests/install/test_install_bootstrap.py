"""`make install` with real processes: what it downloads, from where, and what it says before."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import bootstrap
import pytest

from tests.install.conftest import BASE_PYTHON, ROOT, Checkout

NO_DRIVER = not Path("/proc/driver/nvidia/version").exists() and shutil.which("nvidia-smi") is None
without_driver = pytest.mark.skipif(not NO_DRIVER, reason="this machine has an NVIDIA driver")


@pytest.mark.slow
@without_driver
def test_without_a_driver_pytorch_s_index_gives_the_cpu_build_and_it_is_said_before(checkout: Checkout) -> None:
    checkout.offer("pypi", "2.15.0", "2.13.0")
    checkout.offer("pytorch/cpu", "2.13.0+cpu")
    made = checkout.make("install")
    assert made.returncode == 0, made
    assert checkout.torch_version() == "2.13.0+cpu"
    said = made.stdout.splitlines()
    assert said[1].startswith(
        "plait: no NVIDIA driver was found; installing torch 2.13.0+cpu, for the processor, from http"
    )
    assert "about 200 MB" in said[2]
    again = checkout.make("install")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")


@pytest.mark.slow
@without_driver
def test_an_index_that_does_not_answer_costs_seconds_and_gigabytes_are_announced(
    checkout: Checkout, silent_address: str
) -> None:
    checkout.offer("pypi", "2.13.0")
    made = checkout.make("install", PYTORCH_INDEXES=silent_address)
    assert made.returncode == 0 and checkout.torch_version() == "2.13.0", made
    before, _, _ = made.stdout.partition("Collecting")
    assert f"nor can it be had from {silent_address}/cpu" in before and "about 3 GB" in before and "Ctrl-C" in before


@pytest.mark.slow
@without_driver
def test_a_venv_that_moved_is_made_anew(checkout: Checkout) -> None:
    checkout.offer("pypi", "2.15.0", "2.13.0", "2.13.0+cpu")
    made = checkout.make("install", PYTORCH_INDEXES="http://127.0.0.1:9")
    assert "installing torch 2.13.0+cpu, for the processor, from pip" in made.stdout
    moved = Checkout(folder=checkout.folder.parent / "moved", indexes=checkout.indexes, address=checkout.address)
    checkout.folder.rename(moved.folder)
    made = moved.make("install")
    assert f"plait: making .venv: the one here was made in another folder, {checkout.folder}\n" in made.stdout
    assert str(moved.folder) in (moved.folder / ".venv/pyvenv.cfg").read_text()
    assert moved.torch_version() == "2.13.0+cpu"


def test_a_venv_of_another_python_or_half_made_is_a_problem(tmp_path: Path) -> None:
    venv = tmp_path / ".venv"
    subprocess.run(
        [BASE_PYTHON, "-m", "venv", "--without-pip", venv], check=True
    )  # as a missing python3-venv leaves it
    assert bootstrap.venv_problem(venv) == "the one here does not run, or has no pip"
    (pure,) = venv.glob("lib/python3.*/site-packages")
    (pure / "pip.py").write_text("")
    assert bootstrap.venv_problem(venv) is None
    config = (venv / "pyvenv.cfg").read_text()
    (venv / "pyvenv.cfg").write_text(config.replace("version = 3", "version = 2"))
    assert str(bootstrap.venv_problem(venv)).startswith("the one here was made for Python 2.")
    (venv / "bin" / "python").unlink()
    assert bootstrap.venv_problem(venv) == "the one here does not run, or has no pip"


def test_naming_another_python_makes_the_venv_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv, python = tmp_path / ".venv", tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho 3.99\n")
    python.chmod(0o755)
    assert bootstrap.venv_problem(venv) is None
    monkeypatch.setenv("PYTHON_ORIGIN", "command line")
    assert bootstrap.venv_problem(venv) == "the one here is of Python 3.99, and PYTHON names another"


@without_driver
def test_the_driver_is_asked_for_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bootstrap.driver_version() is None
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 550.54.15\necho 550.54.15\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert bootstrap.driver_version() == "550.54.15"
    smi.write_text("#!/bin/sh\nexit 9\n")  # installed, but no driver answers
    assert bootstrap.driver_version() is None
    assert bootstrap.gpu_capabilities() == []
    smi.write_text("#!/bin/sh\nprintf '9.0\\n12.0\\n[N/A]\\n'\n")
    assert bootstrap.gpu_capabilities() == [(9, 0), (12, 0)]


def test_a_missing_ensurepip_is_a_sentence() -> None:
    """Debian without python3-venv."""
    code = "import sys; sys.modules['ensurepip'] = None; import bootstrap; bootstrap.VENV = bootstrap.Path('/nowhere')"
    run = subprocess.run(
        [BASE_PYTHON, "-c", f"{code}; bootstrap.main()"],
        cwd=ROOT / "install",
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2 and run.stdout == "" and run.stderr.count("\n") == 1
    assert f"apt install python3.{sys.version_info[1]}-venv (as root)" in run.stderr


def test_a_python_that_is_too_old_is_a_sentence_before_anything_else() -> None:
    with pytest.raises(bootstrap.SetupError, match=r"^plait needs Python 3\.11 or newer, and /old is Python 3\.9\.2; "):
        bootstrap.check_python((3, 9, 2), "/old")
    bootstrap.check_python((3, 11, 0), "/new")


@pytest.mark.parametrize("version", ["3.6", "3.9", "3.10"])
def test_an_old_python_says_so_itself(checkout: Checkout, version: str) -> None:
    found = [str(path) for path in Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python3")]
    old = next(filter(None, [shutil.which(f"/usr/bin/python{version}"), *found]), None)
    if old is None:
        pytest.skip(f"no Python {version} on this machine")
    made = checkout.make("install", PYTHON=old)
    assert made.returncode == 2 and made.stdout == ""
    assert made.stderr.startswith(f"plait: plait needs Python 3.11 or newer, and {old} is Python {version}.")
    assert "make PYTHON=python3." in made.stderr and not (checkout.folder / ".venv").exists()


def test_a_python_that_is_not_there_is_a_sentence(checkout: Checkout) -> None:
    made = checkout.make("install", PYTHON="python3.99")
    assert made.returncode == 2 and made.stderr.startswith("plait: there is no python3.99 here; install Python 3.11")


@pytest.mark.parametrize("file", ["bootstrap.py", "torch_build.py"])
def test_the_syntax_is_that_of_python_3_6(file: str) -> None:
    ast.parse((ROOT / "install" / file).read_text(encoding="utf-8"), feature_version=(3, 6))
