"""Bad input: one sentence that says what to do, exit code 2, no traceback, nothing begun and nothing damaged."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from plait.checkpoint.store import checkpoint_for, publish, staging_for
from plait.checkpoint.transfer import whole_slice, write_rank
from tests.end_to_end.command import Place, ended, flip_bit, kill_group, wait_while_running
from tests.end_to_end.conftest import RunWarm


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A place with every kind of bad file."""
    place = Place(tmp_path_factory.mktemp("bad"))
    (place.folder / "empty.txt").write_bytes(b"")
    (place.folder / "binary.txt").write_bytes(b"some text\0and more")
    (place.folder / "latin.txt").write_bytes("über".encode("latin-1") * 100)
    lines = [json.dumps({"text": "something to read"}), json.dumps({"body": "the field has another name"})]
    (place.folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (place.folder / "torn.toml").write_text("[data\nfiles = 3")
    (place.folder / "bare.toml").write_text("[data]\nfiles = play.txt\n")
    (place.folder / "nameless.toml").write_text('[train]\nbudget = "3 steps"\n')
    (place.folder / "typo.toml").write_text('[data]\nfiles = "play.txt"\n[model]\nwidht = 32\n')
    (place.folder / "flat.toml").write_text('run = "x"\n')
    return place


TRAIN = ("train", "tiny.toml")
CASES = {
    "a misspelt key on the command line": ((*TRAIN, "train.budgett=3 steps"), ["train.budgett", "train.budget?"]),
    "a tool that is not installed": ((*TRAIN, 'report.to=["csv", "trackio"]'), ["report.to", "pip", "plait[trackio]"]),
    "a destination that is none": ((*TRAIN, 'report.to=["wandb", "excel"]'), ["report.to", "tensorboard"]),
    "samples by the clock": ((*TRAIN, "report.samples=5 minutes"), ["report.samples", "must count steps"]),
    "a misspelt key in the recipe": (("train", "typo.toml"), ["model.widht", "model.width?"]),
    "a key in the wrong section": ((*TRAIN, "train.lr=1"), ["train.lr", "optimizer.lr?"]),
    "devices that are none": ((*TRAIN, "run.devices=gpu"), ['"gpu" names no devices; write "auto", "cpu"']),
    "a TPU that is not there": ((*TRAIN, "run.devices=tpu"), ["this machine has no TPU"]),
    "a GPU that is not there": ((*TRAIN, "run.devices=97"), ["run.devices names GPU 97"]),
    "more threads than cores": ((*TRAIN, "run.threads=9999"), ["run.threads = 9999 are more than this machine has"]),
    "a model that is not there": (
        (*TRAIN, "model.from=x"),
        ["model is not usable", "comes from the model in model.from"],
    ),
    "a value of the wrong kind": ((*TRAIN, "model.layers=two"), ["model.layers is not usable"]),
    "a budget without a unit": ((*TRAIN, "train.budget=500"), ["train.budget is not usable", "500 steps"]),
    "not an override": ((*TRAIN, "budget"), ['"budget" is not an override', "section.key=value"]),
    "a name that is a path": ((*TRAIN, "run.name=../up"), ['"../up" is not a name']),
    "no such recipe": (("train", "tinny.toml"), ['there is no recipe "tinny.toml"; did you mean "tiny.toml"?']),
    "a folder as recipe": (("train", "."), ["is a folder"]),
    "a recipe that is not TOML": (("train", "torn.toml"), ["is not valid TOML", "line 1"]),
    "a text without quotes": (("train", "bare.toml"), ["line 2", 'a text stands in quotes: files = "play.txt"']),
    "a text in place of a recipe": (("train", "play.txt"), ["is a text, not a recipe; plait new NAME --text play.txt"]),
    "a recipe without .toml": (("train", "torn"), ['did you mean "torn.toml"?']),
    "a recipe in place of a program": (("run", "tiny.toml"), ["is a recipe, no program; type plait train tiny.toml"]),
    "a recipe that came with plait": (
        ("train", "recipes/03-mixed-4-workers.toml"),
        ["plait brings one of that name: ", "/plait/examples/03-mixed-4-workers.toml"],
    ),
    "a plan of text that is not there": (("plan", "tiny.toml", "data.files=plai.txt"), ["plai.txt", "data.files"]),
    "a recipe without data": (("train", "nameless.toml"), ["the recipe does not say data", "[data]"]),
    "a recipe that is no table": (("train", "flat.toml"), ["run is not usable"]),
    "an unknown option": ((*TRAIN, "--frobnicate"), ["--frobnicate", "--help"]),
    "an unknown command": (("trian", "tiny.toml"), ["trian", "--help"]),
    "no recipe": (("train",), ["RECIPE", "--help"]),
    "a file that is not there": ((*TRAIN, "data.files=plai.txt"), ["plai.txt", "data.files"]),
    "an empty file": ((*TRAIN, "data.files=empty.txt"), ["empty.txt is empty"]),
    "a binary file": ((*TRAIN, "data.files=binary.txt"), ["binary.txt is binary", "byte 9"]),
    "a file that is not UTF-8": ((*TRAIN, "data.files=latin.txt"), ["latin.txt is not UTF-8 text at byte 0"]),
    "JSONL without the field": ((*TRAIN, "data.files=rows.jsonl"), ['rows.jsonl:2 has no field "text"']),
    "a vocabulary larger than the model's": ((*TRAIN, "data.tokenizer=gpt2"), ["50257", "model.vocabulary = 300"]),
    "a run that is not there": (("sample", "nobody"), ['there is no run "nobody"']),
    "a bad number for an option": (("sample", "x", "--temperature", "-1"), ["--temperature"]),
    "a number that is no number for an option": (("sample", "x", "--temperature", "nan"), ["--temperature nan"]),
    "a seed of many digits": (("sample", "x", "--seed", "9" * 30), ["--seed", "it should be at most"]),
    "an option that is no whole number": (("sample", "x", "--tokens", "1e3"), ["it should be a whole number"]),
    "a file without its option": (("eval", "x", "other.txt"), ["other.txt comes after the run", "--files"]),
    "a share above all": (("sample", "x", "--top-p", "2"), ["--top-p 2 is no share", "at most 1"]),
}


@pytest.mark.parametrize("case", CASES)
def test_one_sentence_before_anything_begins(bad: Place, case: str, run_warm: RunWarm) -> None:
    arguments, told = CASES[case]
    run = run_warm(bad, *arguments)
    assert run.code == 2, run
    assert all(text in run.sentence() for text in told), run.err
    assert not bad.path("x").parent.exists()


def test_one_sentence_of_a_process(bad: Place) -> None:
    run = bad.run(*TRAIN, "train.budgett=3 steps")
    assert run.code == 2 and "train.budget?" in run.sentence()


def test_a_sequence_longer_than_the_data(bad: Place, run_warm: RunWarm) -> None:
    run = run_warm(bad, *TRAIN, "run.name=long", "train.sequence=9000", "train.batch_tokens=9000")
    assert run.code == 2
    assert "train.sequence = 9000 is longer than the data allow" in run.sentence()
    assert "choose at most" in run.err
    assert not bad.path("long").parent.exists()


@pytest.mark.slow
def test_a_refused_run_leaves_the_folder_of_other_runs(tmp_path: Path, run_warm: RunWarm) -> None:
    place = Place(tmp_path)
    place.path("x").parent.mkdir()
    assert run_warm(place, *TRAIN, "run.name=long", "train.sequence=9000", "train.batch_tokens=9000").code == 2
    assert not list(place.path("x").parent.iterdir())


def test_ctrl_c_while_looking_at_the_world_leaves_no_traceback(bad: Place) -> None:
    process = bad.start_training("early")
    wait_while_running(lambda: len(bad.processes()) > 2, process)  # beside the fork server one looks at the machine
    kill_group(process, signal.SIGINT)
    run = ended(process)
    assert run.code == 130 and "Traceback" not in run.out + run.err
    assert (
        "stopped by Ctrl-C before training began; the same command starts it again\nnext     plait train " in run.out
    ), run
    bad.assert_nobody_left()


@pytest.fixture(scope="module")
def crippled(place: Place, reference: Callable[[int], str]) -> Callable[[str], Path]:
    """Makes an unfinished run with one checkpoint, and returns that checkpoint's folder."""

    def make(name: str) -> Path:
        folder = place.copy_run(reference(2), name)
        (folder / "receipt.json").unlink()
        newest, older = place.checkpoints(name)[-1], place.checkpoints(name)[0]
        shutil.rmtree(folder / "checkpoints" / f"step-{newest}")
        return folder / "checkpoints" / f"step-{older}"

    return make


def refused(place: Place, name: str, checkpoint: Path, run_warm: RunWarm) -> str:
    """The sentence with which a run is refused that cannot go on; its checkpoint stays as it is."""
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    run = run_warm(place, *TRAIN, f"run.name={name}")
    assert run.code == 2, run
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == before
    assert [path.name for path in checkpoint.parent.iterdir()] == [checkpoint.name]
    return run.sentence()


@pytest.mark.slow
def test_a_flipped_bit_in_the_only_checkpoint(place: Place, crippled: Callable[[str], Path], run_warm: RunWarm) -> None:
    checkpoint = crippled("flipped")
    flip_bit(checkpoint / "rank-00000.safetensors")
    sentence = refused(place, "flipped", checkpoint, run_warm)
    assert "the only checkpoint in" in sentence and "rank-00000.safetensors is damaged" in sentence


@pytest.mark.slow
def test_a_missing_shard(place: Place, crippled: Callable[[str], Path], run_warm: RunWarm) -> None:
    checkpoint = crippled("missing")
    (checkpoint / "rank-00001.safetensors").unlink()
    assert "rank-00001.safetensors is missing" in refused(place, "missing", checkpoint, run_warm)


@pytest.mark.slow
def test_a_checkpoint_of_another_model(place: Place, crippled: Callable[[str], Path], run_warm: RunWarm) -> None:
    checkpoint = crippled("foreign")
    shape = place.plan("foreign")["shape"] | {"width": 64}
    shutil.rmtree(checkpoint)
    staging = staging_for(checkpoint.parent, 50)
    write_rank(staging, 0, {"model/norm.weight": whole_slice(torch.ones(64))})
    publish(staging, checkpoint_for(checkpoint.parent, 50), step=50, cursor=350, model=shape, world_size=1)
    sentence = refused(place, "foreign", checkpoint, run_warm)
    assert "this checkpoint has width 64, the recipe asks 32" in sentence


@pytest.mark.slow
def test_ctrl_c_while_sampling(place: Place, reference: Callable[[int], str]) -> None:
    process = place.start("sample", reference(2), "--prompt", "Ka", "--tokens", "1000000")
    assert process.stdout is not None
    first = process.stdout.read(2)
    kill_group(process, signal.SIGINT)
    run = ended(process)
    assert first == "Ka" and run.code == 130 and "Traceback" not in run.err
