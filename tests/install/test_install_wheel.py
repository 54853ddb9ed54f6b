"""The wheel, built by `make wheel` and installed into an empty environment, works from an empty folder elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import plait
from plait.hosts.joining import code_hash
from tests.install.conftest import ROOT

pytestmark = pytest.mark.slow
BUILT_FROM = ("plait", "recipes", "pyproject.toml", "Makefile", "README.md", "LICENSE", "NOTICE")
WATCH = """
import os, sys

def watch(event, arguments):
    path = os.fsdecode(arguments[0]) if arguments and isinstance(arguments[0], (str, bytes)) else ""
    if event in ("open", "os.listdir", "os.scandir") and path.startswith({checkouts!r}):
        with os.fdopen(os.open({log!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a") as log:
            log.write(path + chr(10))

sys.addaudithook(watch)
"""
"""Notes each file of a checkout that a process of the environment opens, its workers included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """An environment that holds plait's wheel and nothing else; the packages that plait needs are the tests' own."""

    environment: Path
    opened: Path
    """Lists what its processes opened of the checkout."""
    wheel: Path

    def run(self, folder: Path, *command: str) -> str:
        """What a program of the environment prints."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PLAIT"))}
        done = subprocess.run(
            [self.environment / "bin" / command[0], *command[1:]],
            cwd=folder,
            env=kept,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done
        return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the checkout, whose `build` holds a module that was removed since."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy)
    (copy / "build" / "lib" / "plait").mkdir(parents=True)
    (copy / "build" / "lib" / "plait" / "removed.py").touch()
    subprocess.run(
        ["make", "--old-file=env", "wheel", f"BIN={Path(sys.executable).parent}"],
        cwd=copy,
        env={**os.environ, "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1", "PIP_NO_CACHE_DIR": "1"},
        check=True,
        timeout=300,
    )
    (built,) = (copy / "dist").iterdir()
    assert built.name == f"plait-{plait.__version__}-py3-none-any.whl"
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("installed")
    environment, opened = folder / "env", folder / "opened.txt"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*pip, str(wheel)], check=True, timeout=300)
    (site,) = environment.glob("lib/python*/site-packages")
    needed = [path for path in sys.path if path.endswith("-packages")]
    (site / "needed.pth").write_text("\n".join([*needed, "import watch_checkout"]))
    inside = [f"{ROOT}/{name}" for name in (*BUILT_FROM, "tests", "install", "docs")]
    (site / "watch_checkout.py").write_text(WATCH.format(checkouts=tuple(inside), log=str(opened)))
    return Installed(environment=environment, opened=opened, wheel=wheel)


def test_the_wheel_holds_every_file_of_the_package_and_the_recipes(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist() if name.startswith("plait/")}
    package = {path for path in (ROOT / "plait").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    expected = {str(path.relative_to(ROOT)): path for path in package if path.name != "README.md"}
    expected |= {f"plait/examples/{path.name}": path for path in (ROOT / "recipes").iterdir() if path.is_file()}
    assert set(held) == set(expected)
    assert [name for name, path in expected.items() if held[name] != path.read_bytes()] == []


def test_from_an_empty_folder_to_a_text_without_a_checkout(installed: Installed, tmp_path: Path) -> None:
    def run(*command: str) -> str:
        return installed.run(tmp_path, "plait", *command)

    assert run("--version") == f"plait {plait.__version__}\n"
    run("new", "first")
    small = ("model.layers=2", "model.width=32", "model.heads=2", "model.vocabulary=300", "train.sequence=16")
    small += ("train.batch_tokens=128", "layout.replicate=2", "train.budget=4 steps")
    assert "first.toml" not in run("plan", "first.toml", "--cluster", "8xH100", "--html", "plan.html")
    assert (tmp_path / "plan.html").stat().st_size > 10_000
    run("verify", "first.toml", *small)
    run("train", "first.toml", *small)
    receipt = json.loads((tmp_path / "runs" / "first" / "receipt.json").read_text())
    assert receipt["versions"]["plait"] == plait.__version__
    assert run("sample", "first", "--prompt", "KING", "--tokens", "4").startswith("KING")
    (tmp_path / "other.txt").write_text(
        "Once more unto the breach, dear friends.\n" * 20
    )  # the held-out text takes minutes
    assert json.loads(run("eval", "first", "--files", "other.txt"))
    assert not installed.opened.exists(), installed.opened.read_text()


def test_the_recipe_of_new_trains_as_it_is(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "tiny.txt").write_text("To be, or not to be, that is the question.\n" * 2000)
    installed.run(tmp_path, "plait", "new", "tiny")
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(recipe.read_text().replace('budget = "5 minutes"', 'budget = "5 seconds"'))
    installed.run(tmp_path, "plait", "plan", "tiny.toml")
    installed.run(tmp_path, "plait", "train", "tiny.toml")
    assert (tmp_path / "runs" / "tiny" / "receipt.json").is_file()


def test_a_host_with_the_wheel_and_one_with_the_checkout_are_alike(installed: Installed, tmp_path: Path) -> None:
    code = "import plait; print(plait.__file__); from plait.hosts.joining import code_hash; print(code_hash())"
    where, found = installed.run(tmp_path, "python", "-c", code).split()
    assert where.startswith(str(installed.environment))
    assert found == code_hash()
