"""Models of a hub are fetched file by file, without what plait does not read, and kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from plait.errors import PlaitError
from plait.interop.base_model import read_base_model
from plait.interop.hub import fetch_model
from tests.interop.folders import write_model
from tests.interop.hub_server import small_hub

FETCH = """
import sys
from plait.errors import PlaitError
from plait.interop.hub import fetch_model
try:
    print(fetch_model(sys.argv[1]))
except PlaitError as error:
    print("refused:", error)
"""


def fetched(address: str, home: Path, source: str) -> str:
    """What a process of its own gets, as huggingface_hub reads its settings when it is imported."""
    settings = {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_ETAG_TIMEOUT": "2"}
    call = [sys.executable, "-c", FETCH, source]
    done = subprocess.run(call, env=os.environ | settings, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.strip()


def test_a_model_is_fetched_once_and_read_without_the_hub_after_that(tmp_path: Path) -> None:
    own = tmp_path / "hub" / "me" / "small"
    write_model(own, shard_size="20KB")
    (own / "LICENSE").write_text("as you like")
    (own / "pytorch_model.bin").write_bytes(b"a pickle")
    (own / "modeling_small.py").write_text("raise SystemExit")
    with small_hub(tmp_path / "hub") as (address, asked):
        folder = Path(fetched(address, tmp_path / "cache", "hub:me/small"))
        assert read_base_model(folder).shape == read_base_model(own).shape
        assert {path.name for path in folder.iterdir()} >= {"LICENSE", "tokenizer.json", "config.json"}
        assert not any(path.endswith((".bin", ".py")) for path in asked)
        answer = fetched(address, tmp_path / "cache", "hub:me/nobody")
        assert answer.startswith("refused: hub:me/nobody cannot be fetched (") and "check the name" in answer
    assert fetched(address, tmp_path / "cache", "hub:me/small") == str(folder)  # the hub is gone


@pytest.mark.parametrize("source", ["hub:", "hub:small", "hub:me/../../etc", "hub:a/b/c"])
def test_a_name_that_is_none_is_refused(source: str) -> None:
    with pytest.raises(PlaitError, match="names no model of a hub"):
        fetch_model(source)
