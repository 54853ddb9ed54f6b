"""An export is loaded by transformers 4.57, in an environment of its own, with the scores that transformers 5 finds."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from plait.commands.export import write_export
from plait.screen.screen import SilentScreen
from tests.commands.test_commands_export import CHANGES, saved_run

ENVIRONMENT = Path(__file__).parents[2] / ".venv-transformers4"
"""Kept: making it again takes a minute."""
WANTED = "transformers==4.57.6"
SCRIPT = """
import json, sys
import torch, transformers
from safetensors.torch import save_file

assert transformers.__version__ == "4.57.6", transformers.__version__
tokens, text = json.loads(sys.argv[1])
for folder in sys.argv[2:]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor(tokens)).logits
    save_file({"logits": logits.contiguous(), "ids": torch.tensor(ids)}, folder + "/by4.safetensors")
"""


@pytest.fixture(scope="module")
def python4() -> Path:
    """The Python of an environment with transformers 4.57 before all that this one has."""
    python = ENVIRONMENT / "bin" / "python"
    known = "import transformers; assert transformers.__version__ == '4.57.6'"
    if python.exists() and not subprocess.run([python, "-c", known], check=False, capture_output=True).returncode:
        return python
    venv.create(ENVIRONMENT, with_pip=True, clear=True, symlinks=True)
    (packages,) = ENVIRONMENT.glob("lib/python3.*/site-packages")
    (packages / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")  # torch and the rest: behind its own
    made = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", WANTED],
        check=False,
        capture_output=True,
        text=True,
    )
    if made.returncode and "No matching distribution" in made.stderr:
        pytest.skip("no package index here has transformers 4.57")
    assert not made.returncode, made.stderr
    return python


@pytest.mark.slow
def test_an_export_is_the_same_model_in_transformers_4(python4: Path, tmp_path: Path) -> None:
    folders: list[Path] = []
    for name, changes in CHANGES.items():
        working, _ = saved_run(tmp_path / name, **changes)
        folders.append(write_export("tiny", Path(name), screen=SilentScreen(), working=working))
    tokens = torch.randint(0, 257, (2, 8), generator=torch.Generator().manual_seed(3))
    asked = json.dumps([tokens.tolist(), "abc de"])
    done = subprocess.run(
        [python4, "-c", SCRIPT, asked, *map(str, folders)],
        check=False,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin"},
    )
    assert not done.returncode, done.stderr
    for folder in folders:
        by4 = load_file(folder / "by4.safetensors")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            by5 = model(tokens).logits
        assert (by4["logits"] - by5).abs().max() <= 1e-5 * by5.abs().max(), folder.name
        assert by4["ids"].tolist() == transformers.AutoTokenizer.from_pretrained(folder)("abc de")["input_ids"]
    assert len(folders) == 6 and int(transformers.__version__.split(".")[0]) >= 5, sys.executable
