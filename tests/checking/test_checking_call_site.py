"""A finding names a line of the person's program, wherever its libraries are installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from plait.checking.watch.call_site import is_library


def installed(folder: Path, *, with_facts: bool) -> Path:
    """A file of a package in a folder, as `pip install --target` leaves it."""
    file = folder / "package" / "inner" / "file.py"
    file.parent.mkdir(parents=True)
    for place in (folder / "package", file.parent):
        (place / "__init__.py").touch()
    if with_facts:
        (folder / "package-1.0.dist-info").mkdir()
    return file


@pytest.mark.parametrize(
    "name",
    [
        json.__file__,
        torch.__file__,
        "/usr/local/lib/python3.11/dist-packages/torch/nn/modules/module.py",
        "/home/person/.local/lib/python3.11/site-packages/accelerate/data_loader.py",
        "<frozen runpy>",
    ],
)
def test_installed_files_are_libraries(name: str) -> None:
    assert is_library(name)


def test_packages_in_a_folder_of_their_own_are_libraries(tmp_path: Path) -> None:
    assert is_library(str(installed(tmp_path, with_facts=True)))


def test_a_person_s_files_are_not_libraries(tmp_path: Path) -> None:
    assert not is_library(str(installed(tmp_path, with_facts=False)))
    assert not is_library(str(tmp_path / "train.py"))
    assert not is_library("train.py")
