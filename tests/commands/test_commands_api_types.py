"""The public names are typed whole, as another program's type checker sees them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import plait

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_type_of_every_public_name_is_known(tmp_path: Path) -> None:
    """By `pyright --verifytypes plait`: of the names in dir(plait), and of all that their types are made of."""
    command = ["-m", "pyright", "--pythonpath", sys.executable, "--verifytypes", "plait", "--ignoreexternal"]
    told = subprocess.run(
        [sys.executable, *command, "--outputjson"],
        cwd=tmp_path,
        # pyright follows the link of an environment's Python, and would look for torch beside what it points to.
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), sysconfig.get_path("purelib")))},
        capture_output=True,
        text=True,
        check=False,
    )
    symbols = json.loads(told.stdout)["typeCompleteness"]["symbols"]
    public = {symbol["name"]: symbol for symbol in symbols if symbol["name"].count(".") == 1}
    # pyright lists __version__ under the module that has it, if at all.
    assert public.keys() >= {f"plait.{name}" for name in dir(plait) if name != "__version__"}
    assert [name for name, symbol in public.items() if not symbol["isTypeKnown"] or symbol["isTypeAmbiguous"]] == []
    assert (ROOT / "plait" / "py.typed").exists()
