"""What a finished run leaves: its files, its receipt, and a model to sample from and to measure."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from io import StringIO
from itertools import count
from math import exp
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as RichConsole

import plait
from plait.checkpoint.manifest import tensor_names
from plait.checkpoint.store import publish, staging_for, verify_checkpoint
from plait.checkpoint.transfer import read_tensor, whole_slice, write_rank
from plait.commands.evaluate import evaluate
from plait.screen.terminal import TerminalScreen
from tests.end_to_end.command import STEPS, Place, some_text
from tests.end_to_end.conftest import RunWarm

RECEIPT = {
    "steps", "tokens", "world_size", "layout", "train_loss", "eval_loss", "eval_nats_per_byte", "step_s_median",
    "tokens_per_s", "mfu", "mfu_causal", "peak_tensor_bytes", "peak_rss_bytes", "wall_s", "device_hours", "versions",
    "device", "predicted_step_s", "predicted_peak_bytes_per_device", "step_error", "memory_error", "cost_usd",
    "energy_wh", "sha256", "one_device_step_s", "speedup_vs_one", "efficiency", "one_device_from", "predicted_items",
    "measured_items", "predicted_rss_bytes", "rss_error", "taught_by_runs", "timed_step_s", "untimed_step_s",
    "matmul_backend", "matmul_flops", "matmul_error", "choices_accuracy", "choices_accuracy_per_byte", "pair_accuracy",
    "incidents", "useful_share", "samples_skipped", "updates_skipped", "loss_scale", "copy_every_steps", "copy_share",
    "lost_by_cause", "optimizer", "bottleneck",
}  # fmt: skip
STEP_LINE = {"step", "tokens", "loss", "grad_norm", "lr", "step_s", "tokens_per_s", "mfu", "data_wait_s"}
EVALUATION_LINE = {"step", "eval_loss", "eval_nats_per_byte"}


def train(name: str, *more: str) -> tuple[str, ...]:
    """The words of the command that goes on with a run."""
    return ("train", "tiny.toml", f"run.name={name}", *more)


@pytest.fixture
def name(reference: Callable[[int], str]) -> str:
    return reference(2)


@pytest.fixture
def folder(place: Place, name: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place.folder)
    return place.path(name)


def test_the_receipt_says_everything_and_agrees_with_the_lines(place: Place, name: str, folder: Path) -> None:
    receipt: dict[str, Any] = json.loads((folder / "receipt.json").read_text())
    assert receipt.keys() == RECEIPT
    steps = [line for line in place.lines(name) if "loss" in line]
    evaluations = [line for line in place.lines(name) if "eval_loss" in line]
    assert receipt["steps"] == STEPS == len(steps)
    assert receipt["tokens"] == steps[-1]["tokens"] == STEPS * 112
    assert receipt["step_error"] == receipt["predicted_step_s"] / receipt["step_s_median"] - 1
    assert receipt["world_size"] == 2 and receipt["layout"]["replicate"] == 2
    assert receipt["matmul_backend"] in ("default", "onednn")
    assert receipt["matmul_flops"] > 1e6 and 0 < receipt["matmul_error"] < 1e-5
    assert receipt["train_loss"] == steps[-1]["loss"] < steps[0]["loss"] - 1
    assert receipt["eval_loss"] == evaluations[-1]["eval_loss"]
    assert receipt["eval_nats_per_byte"] == evaluations[-1]["eval_nats_per_byte"]
    assert 0 < receipt["mfu_causal"] < receipt["mfu"] < 1
    assert len(receipt["peak_tensor_bytes"]) == len(receipt["peak_rss_bytes"]) == 2
    assert min(receipt["peak_rss_bytes"]) > 50e6 and min(receipt["peak_tensor_bytes"]) > 16 * 40_000
    assert receipt["wall_s"] > sum(line["step_s"] for line in steps)
    assert receipt["device_hours"] == pytest.approx(receipt["wall_s"] / 3600)  # two workers on one device
    assert {"torch", "python", "plait"} <= receipt["versions"].keys()


def test_every_step_has_its_line_with_the_promised_keys_and_no_other(place: Place, name: str) -> None:
    lines = place.lines(name)
    steps = [line for line in lines if line.keys() == STEP_LINE]
    evaluations = [line for line in lines if line.keys() == EVALUATION_LINE]
    assert len(steps) + len(evaluations) == len(lines)
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert [line["step"] for line in evaluations] == [STEPS // 2, STEPS]
    assert all(line["step_s"] > 0 and line["data_wait_s"] >= 0 and 0 < line["mfu"] < 1 for line in steps)


def test_the_folder_has_the_promised_files(place: Place, name: str, folder: Path) -> None:
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    promised = {"recipe.toml", "plan.json", "metrics.jsonl", "tensorboard", "checkpoints", "receipt.json"}
    assert promised <= names
    assert place.checkpoints(name) == [STEPS - 10, STEPS]
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    files = {path.name for path in (folder / "checkpoints" / f"step-{STEPS}").iterdir()}
    assert files == {"manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"}


def test_nobody_else_can_read_the_run_or_its_data(place: Place, name: str, folder: Path) -> None:
    private = [place.folder / "runs", folder, place.folder / ".plait"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in private] == [0o700] * 3


def test_nothing_in_the_manifest_tells_of_clock_host_path_or_name(place: Place, name: str, folder: Path) -> None:
    text = place.manifest(name).decode()
    assert (
        name not in text
        and str(place.folder) not in text
        and "/" not in text.replace("model/", "").replace("adam_m/", "").replace("adam_v/", "").replace("rng/", "")
    )
    hashes = [part["sha256"] for part in [*json.loads(text)["parts"], *json.loads(text)["rng"]]]
    hashes += [json.loads(text)[key]["sha256"] for key in ("step", "cursor")]
    assert all(len(each) == 64 and set(each) <= set("0123456789abcdef") for each in hashes)
    assert len(json.loads(text)["rng"]) == 2


def test_a_finished_run_asked_again_prints_its_receipt_and_writes_nothing(
    place: Place, name: str, run_warm: RunWarm
) -> None:
    def state() -> dict[str, tuple[int, bytes]]:
        files = [path for path in place.path(name).rglob("*") if path.is_file() and path.name != ".lock"]
        return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    before = state()
    again = run_warm(place, *train(name, "layout.replicate=2", "--verbose"))
    assert again.code == 0 and not again.err
    assert "is finished" in again.out and f"{STEPS} steps" in again.out and "nats per token" in again.out
    short, reasons = (run_warm(place, *train(name, "layout.replicate=2", *more)) for more in ((), ("--why",)))
    assert len(short.out.splitlines()) < 12 and "nats per byte held out" in short.out
    assert all(reason in reasons.out and reason not in short.out for reason in place.plan(name)["reasons"])
    assert state() == before


def test_a_finished_run_is_refused_other_text(place: Place, name: str, run_warm: RunWarm) -> None:
    (place.folder / "other.txt").write_text(some_text(300, seed=2))
    other, missing = (run_warm(place, *train(name, f"data.files={file}")) for file in ("other.txt", "missing.txt"))
    assert (other.code, missing.code) == (2, 2), (other, missing)
    changed = "the text is not what this run was begun with: other.txt is new, play.txt is gone; restore the files"
    assert other.sentence().startswith(changed)
    assert "no file matches " in missing.sentence() and "missing.txt" in missing.err
    moved = place.folder / "moved.txt"
    moved.write_bytes((place.folder / "play.txt").read_bytes())
    again = run_warm(place, *train(name, f"data.files={moved}"))
    assert again.code == 0 and "is finished" in again.out


def test_from_python_it_is_the_same(name: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    receipt = plait.train("tiny.toml", [f"run.name={name}"], progress="lines")
    assert receipt.steps == STEPS
    assert f"{STEPS} steps" in capfd.readouterr().out
    with pytest.raises(plait.PlaitError, match=r"optimizer.lr was"):
        plait.train("tiny.toml", [f"run.name={name}", "optimizer.lr=3.0"])
    assert plait.load_recipe("tiny.toml").run.name == "tiny"


def test_sample_goes_on_with_the_prompt_and_the_same_seed_gives_the_same(
    place: Place, name: str, folder: Path, run_warm: RunWarm
) -> None:
    asked = ("sample", name, "--prompt", "Kalo mi", "--tokens", "24", "--seed", "5")
    one = run_warm(place, *asked)
    assert one.code == 0 and not one.err
    assert one.out.startswith("Kalo mi") and one.out.endswith("\n") and len(one.out) > len("Kalo mi") + 12
    assert one.out == "".join(plait.sample(name, "Kalo mi", tokens=24, seed=5)) + "\n"
    assert one.out != "".join(plait.sample(name, "Kalo mi", tokens=24, seed=6)) + "\n"


def test_temperature_0_needs_no_seed(folder: Path) -> None:
    texts = {"".join(plait.sample(str(folder), "Lo", tokens=20, temperature=0, seed=seed)) for seed in (1, 2)}
    assert len(texts) == 1


def test_eval_says_what_training_said(place: Place, name: str, folder: Path) -> None:
    run = place.run("eval", name)
    assert run.code == 0
    told = json.loads(run.out)
    assert run.err == f"eval     {plait.evaluate(name).in_words()}\n"
    assert f"a perplexity of {exp(told['eval_loss']):.4g}" in run.err
    named = {"nats_per_token", "nats_per_byte", "tokens", "bytes"}
    assert told.keys() == {"step", "eval_loss", "eval_nats_per_byte", *named}
    assert (told["nats_per_token"], told["nats_per_byte"]) == (told["eval_loss"], told["eval_nats_per_byte"])
    last = place.lines(name)[-1]
    assert told["step"] == STEPS == last["step"]
    assert told["eval_loss"] == pytest.approx(last["eval_loss"], rel=1e-6)
    assert told["eval_nats_per_byte"] == pytest.approx(last["eval_nats_per_byte"], rel=1e-6)


@pytest.mark.slow
def test_eval_shows_how_far_it_is(name: str, folder: Path) -> None:
    out, clock = StringIO(), count(0.0, 10.0)  # each look at the clock finds it ten seconds later
    evaluate(name, [], screen=TerminalScreen(RichConsole(file=out), clock=lambda: next(clock)))
    lines = out.getvalue().splitlines()
    assert lines[0] == f"working  opening {name}" and "working  measuring the loss, 0%" in lines


@pytest.mark.slow
def test_eval_of_the_held_out_bytes_as_a_file_is_the_same(place: Place, name: str, folder: Path) -> None:
    data = (place.folder / "play.txt").read_bytes()
    cut = len(data) - int(len(data) * 0.05)
    while data[cut] & 0xC0 == 0x80:  # the hold-out begins with a whole character
        cut += 1
    (place.folder / "tail.txt").write_bytes(data[cut:])
    own, tail, all_of_it = (plait.evaluate(name, files) for files in ((), ["tail.txt"], ["tail.txt", "play.txt"]))
    assert tail["bytes"] == own["bytes"] == len(data) - cut
    assert tail["tokens"] == own["tokens"]
    assert tail["eval_loss"] == pytest.approx(own["eval_loss"], rel=1e-6)
    assert tail["eval_nats_per_byte"] == pytest.approx(own["eval_nats_per_byte"], rel=1e-6)
    assert all_of_it["bytes"] == len(data) + tail["bytes"]
    assert all_of_it["tokens"] > 15 * tail["tokens"] and all_of_it["eval_loss"] < 4


@pytest.mark.slow
def test_eval_of_a_file_that_is_not_there(place: Place, name: str, run_warm: RunWarm) -> None:
    run = run_warm(place, "eval", name, "--files", "nothing.txt")
    assert run.code == 2
    assert 'no file matches "nothing.txt"' in run.sentence()


@pytest.mark.slow
def test_weights_that_are_not_finite_are_said_to_be_so(place: Place, name: str, run_warm: RunWarm) -> None:
    """A checkpoint of a release that still saved them."""
    folder = place.copy_run(name, "not-finite")
    path = folder / "checkpoints" / f"step-{STEPS}"
    manifest = verify_checkpoint(path)
    tensors = {key: read_tensor(path, manifest, key) for key in tensor_names(manifest)}
    next(tensor for key, tensor in tensors.items() if key.startswith("model/")).fill_(float("nan"))
    staging = staging_for(folder / "checkpoints", STEPS)
    write_rank(staging, 0, {key: [whole_slice(tensor)] for key, tensor in tensors.items()})
    publish(staging, path, step=STEPS, cursor=manifest.cursor, model=dict(manifest.model), world_size=1)
    evaluated, sampled = (
        run_warm(place, *words) for words in (("eval", "not-finite"), ("sample", "not-finite", "--tokens", "3"))
    )
    assert (evaluated.code, sampled.code) == (2, 2)
    assert f"step-{STEPS} gives a loss of nan: its run diverged" in evaluated.sentence()
    assert "scores are not finite: its run diverged" in sampled.sentence()


def test_a_finished_run_refuses_a_layout_that_cannot_be(place: Place, name: str, run_warm: RunWarm) -> None:
    refused = run_warm(place, *train(name, "layout.replicate=1", "layout.tensor=3"))
    assert refused.code == 2 and "tensor = 3" in refused.sentence()
