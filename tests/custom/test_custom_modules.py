"""Programs that are named as modules, the errors of those that are not there, and the folders of what workers print."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from plait.commands.programs.program_module import program_module
from plait.commands.programs.run_program import log_folder
from plait.custom.worker import failure_sentence
from plait.errors import PlaitError
from plait.working_folder import WorkingFolder
from tests.custom.test_custom_programs import ENVIRONMENT

FILES = {
    "pkg/__init__.py": "PLACE = 'pkg'\n",
    "pkg/net.py": "SIZE = 3\n",
    "pkg/train.py": "import sys\nimport plait\nfrom . import PLACE\nfrom .net import SIZE\n"
    "print(__name__, __package__, __spec__.name, PLACE, SIZE, sys.argv[1:], sys.path[0])\n",
    "pkg/inner/__init__.py": "",
    "pkg/inner/__main__.py": "",
    "loose/deep/part.py": "",
    "alone.py": "",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_module_runs_in_its_package_as_python_runs_it(folder: Path) -> None:
    by_plait = (sys.executable, "-m", "plait", "run", "-m", "pkg.train", "--", "--rate", "0.1")
    by_python = (sys.executable, "-m", "pkg.train", "--rate", "0.1")
    found, expected = (
        subprocess.run(one, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=180, check=False)
        for one in (by_plait, by_python)
    )
    assert (found.returncode, found.stdout) == (0, expected.stdout), found
    assert found.stdout == f"__main__ pkg pkg.train pkg 3 ['--rate', '0.1'] {folder}\n"


@pytest.mark.parametrize(
    ("name", "module", "file"),
    [
        ("pkg.train", "pkg.train", "pkg/train.py"),
        ("pkg.inner", "pkg.inner.__main__", "pkg/inner/__main__.py"),
        ("loose.deep.part", "loose.deep.part", "loose/deep/part.py"),
        ("alone", "alone", "alone.py"),
    ],
)
def test_modules_are_found_from_the_current_folder(folder: Path, name: str, module: str, file: str) -> None:
    found = program_module(name)
    assert (found.module, found.path) == (module, folder / file)
    assert "pkg" not in sys.modules  # nothing of it is imported by the launcher


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("pkg.there", "there is no module pkg.there in .*, nor an installed one"),
        ("nothing.there", "there is no module nothing in .*go to the folder that has nothing in it"),
        ("pkg", r"pkg is a package without __main__.py, which would be run; .*: pkg.net, pkg.train$"),
        ("loose", "loose is a package without __main__.py"),
        ("pkg.train.epoch", "pkg.train.epoch is not there: .*train.py is a module, and no package"),
        ("pkg/train.py", "pkg/train.py is a file; leave out -m, or name the module: plait run -m pkg.train"),
        ("a b", '"a b" is no name of a module'),
        ("sys", "there is no module sys"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_what_is_no_module_to_run_is_said_before_a_worker_starts(name: str, sentence: str) -> None:
    with pytest.raises(PlaitError, match=sentence) as raised:
        program_module(name)
    assert raised.value.exit_code == 2


@pytest.mark.parametrize(
    ("below", "file", "advice"),
    [
        ("", "pkg/train.py", "type plait run -m pkg.train"),
        ("pkg", "pkg/train.py", "type plait run -m pkg.train in the folder {folder}"),
        ("", "loose/deep/part.py", "type plait run -m loose.deep.part"),
        ("loose/deep", "loose/deep/part.py", "type plait run -m deep.part in the folder {folder}/loose"),
    ],
)
def test_a_file_that_imports_from_its_package_is_told_how_it_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, below: str, file: str, advice: str
) -> None:
    path = folder / file
    path.write_text("from .net import SIZE\n")
    monkeypatch.chdir(folder / below)
    with pytest.raises(ImportError) as raised:
        runpy.run_path(str(path))
    said = failure_sentence(raised.value, path, path.name, 0)
    assert said == (
        f"rank 0 of {path.name}, line 1 imports from its own package, which Python allows modules alone; "
        + advice.format(folder=folder)
    )


def test_memory_running_out_in_a_program_says_what_helps_in_one(folder: Path) -> None:
    said = failure_sentence(MemoryError(), folder / "alone.py", "alone.py", 1)
    assert said.endswith('; take a smaller batch, accumulate=, layout="shard parameters" or recompute="full"')


def test_runs_of_one_name_have_folders_of_their_own_while_they_last(tmp_path: Path) -> None:
    working = WorkingFolder(tmp_path)
    programs = working.cache / "programs"
    with log_folder("my", working) as first, log_folder("my", working) as second, log_folder("other", working) as other:
        assert [first, second, other] == [programs / "my", programs / "my-2", programs / "other"]
        (first / "rank-1.log").write_text("first")
        (second / "rank-1.log").write_text("second")
    with log_folder("my", working) as again:
        assert again == first and not (first / "rank-1.log").exists()
        assert (second / "rank-1.log").read_text() == "second"
