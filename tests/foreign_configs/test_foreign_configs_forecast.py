"""Forecasts of described runs: how programs' habits move memory, what a change helps, and two whole answers."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.foreign_configs import ROWS, figures, judged
from plait.commands.check_file import check_configuration
from plait.errors import PlaitError
from plait.foreign_configs.answer import checked_config_json, checked_config_text
from plait.foreign_configs.changes import helpful_change
from plait.foreign_configs.forecast import RunForecast, forecast
from plait.foreign_configs.models import model_numbers, model_size_of
from plait.foreign_configs.reading import read_configuration
from plait.foreign_configs.torchtitan import TORCHTITAN_TOML
from plait.machines.cluster import read_cluster
from tests.foreign_configs import texts

GOLDEN = Path(__file__).parents[1] / "golden"
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SOME = ("litgptres-11", "titan2024-02", "axolotl-08", "peftds-02", "meg21-003", "kor22-005", "tinyllama-01")
"""One row of most sources."""


def forecast_of(text: str, file: str, folder: Path, machines: str, *said: str) -> RunForecast:
    (folder / file).write_text(text)
    return forecast(read_configuration(str(folder / file), said)[1], read_cluster(machines))


@pytest.mark.parametrize(
    ("model", "billions"),
    [("NousResearch/Llama-2-7b-hf", 6.74), ("meta-llama/Meta-Llama-3-8B-Instruct", 8.03), ("Qwen/Qwen2.5-72B", 72.7),
     ("google/gemma-2-9b-it", 9.24), ("mistralai/Mixtral-8x7B-v0.1", 46.7), ("openai-community/gpt2-xl", 1.56),
     ("unsloth/llama-3.2-1b-instruct-bnb-4bit", 1.24), ("tiiuae/falcon-7b", 6.92), ("openai/gpt-oss-20b", 20.9)],
)  # fmt: skip
def test_public_models_have_their_published_size(model: str, billions: float) -> None:
    assert model_size_of(model_numbers(model)) / 1e9 == pytest.approx(billions, rel=0.02)


def test_an_unknown_model_is_asked_for_and_its_config_read(tmp_path: Path) -> None:
    with pytest.raises(PlaitError, match=r"does not know this model.*give model=PATH"):
        model_numbers("somebody/something-new-9b")
    values = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 64,
              "rms_norm_eps": 1e-5}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert model_numbers(str(tmp_path))["layers"] == model_numbers(str(tmp_path / "config.json"))["layers"] == 2


def test_memory_follows_the_numbers_that_a_configuration_keeps(tmp_path: Path) -> None:
    found = forecast_of(texts.TRL_JSON, "a.json", tmp_path, "8xH100")
    one, run = 8.03e9, found.run
    assert found.memory["parameters"] + found.memory["optimizer"] == pytest.approx(one * 6 / 8, rel=0.02)
    wide = forecast(replace(run, weights="float32"), found.cluster)
    assert wide.memory["parameters"] + wide.memory["optimizer"] == pytest.approx(one * 12 / 8, rel=0.02)
    narrow = forecast(replace(run, optimizer="adamw_bnb_8bit"), found.cluster)
    assert narrow.memory["parameters"] + narrow.memory["optimizer"] == pytest.approx(one * 4 / 8, rel=0.02)
    alone = forecast(replace(run, sharded="nothing"), found.cluster)
    assert alone.memory["parameters"] == pytest.approx(one * 2, rel=0.02)
    smaller = forecast(replace(run, sharded="nothing"), read_cluster("8xA100 40GB"))
    assert (found.verdict, smaller.verdict) == ("fits", "does not fit")


def test_quantized_weights_take_their_bits_and_time_to_unpack(tmp_path: Path) -> None:
    found = forecast_of(texts.AXOLOTL, "a.yaml", tmp_path, "1x4090")
    plain = forecast(replace(found.run, quantized_bits=0), found.cluster)
    assert plain.memory["parameters"] - found.memory["parameters"] == pytest.approx(6.48e9 * (2 - 0.5157), rel=0.01)
    assert found.time["dequantize"] > 0 and "dequantize" not in plain.time
    assert found.needed_bytes < plain.needed_bytes


@pytest.mark.parametrize(
    ("file", "text", "machines", "said", "sentence"),
    [
        ("a.json", texts.DEEPSPEED, "8xH100", (), "how long sequences are; give sequence=NUMBER"),
        ("a.json", texts.DEEPSPEED, "8xH100", ("sequence=128",), "which model is trained; give model=NAME"),
        ("a.sh", texts.MEGATRON, "8xH100", (), "for 16 devices, and 8xH100 has 8"),
        (
            "a.sh",
            texts.MEGATRON,
            "2x(8xH100)",
            ("batch_sequences=12",),
            "does not divide into micro-batches of 1 on 8 ranks",
        ),
        ("a.toml", texts.TORCHTITAN, "1xH100", (), "tensor 2 × pipeline 1 × context 1 = 2 does not divide 1 device"),
        ("a.yaml", texts.AXOLOTL, "4xH100+4xA100@1G", (), "devices of several kinds"),
    ],
)
def test_what_cannot_be_laid_out_is_one_sentence(
    file: str, text: str, machines: str, said: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(PlaitError, match=sentence):
        forecast_of(text, file, tmp_path, machines, *said)


@pytest.mark.parametrize(
    ("name", "file", "text", "machines", "said"),
    [
        ("check-axolotl", "qlora.yaml", texts.AXOLOTL.replace("4096", "16384"), "1x4090", ["samples=2000"]),
        ("check-megatron", "train.sh", texts.MEGATRON, "2x(8xH100)+400G", []),
    ],
)
def test_whole_answers(name: str, file: str, text: str, machines: str, said: list[str], tmp_path: Path) -> None:
    (tmp_path / file).write_text(text)
    checked = check_configuration(str(tmp_path / file), said, cluster=machines)
    golden, answer = GOLDEN / f"{name}.txt", checked_config_text(checked) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(answer, encoding="utf-8")
    assert answer == golden.read_text(encoding="utf-8"), f"{golden} says otherwise; UPDATE_GOLDEN=1 writes it again"
    values = json.loads(checked_config_json(checked))
    assert sum(values["memory"].values()) == pytest.approx(values["needed_bytes"], rel=1e-6)
    assert sum(values["time"].values()) == pytest.approx(values["step_s"])


def test_a_run_that_does_not_fit_is_made_to_fit_without_other_mathematics(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(
        texts.TRL_JSON.replace('"gradient_checkpointing": true', '"gradient_checkpointing": false')
    )
    checked = check_configuration(str(tmp_path / "a.json"), ["micro_sequences=16", "accumulation=2"], cluster="8xH100")
    assert checked.found.verdict == "does not fit" and checked.exit_code == 1
    assert checked.change is not None and checked.change.keeps_mathematics
    assert checked.change.after.verdict == "fits"
    assert checked.change.after.workload.batch_sequences == checked.found.workload.batch_sequences


def test_a_pipeline_s_micro_batch_is_changed_by_its_own_key(tmp_path: Path) -> None:
    """In torchtitan local_batch_size is what a pipeline takes in a step, and not its micro-batch."""
    text = texts.TORCHTITAN.replace("local_batch_size = 2", "local_batch_size = 32").replace(
        "tensor_parallel_degree = 2", "pipeline_parallel_degree = 2\npipeline_parallel_microbatch_size = 32"
    )
    found = forecast_of(text, "a.toml", tmp_path, "8xH100")
    ways = {key: value for key, value in TORCHTITAN_TOML.changes.items() if "micro-batch" in key}
    change = helpful_change(found, found.cluster, replace(TORCHTITAN_TOML, changes=ways))
    assert found.verdict == "does not fit" and change is not None
    assert change.text.startswith("parallelism.pipeline_parallel_microbatch_size = ")


def published_rows() -> list[dict[str, str]]:
    with ROWS.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_no_public_configuration_that_ran_out_of_memory_is_said_to_fit() -> None:
    rows = [row for row in published_rows() if row["outcome"] == "out of memory"]
    found = figures([*judged(rows), *judged([row for row in published_rows() if row["id"] in SOME])])
    assert len(rows) == found["out_of_memory"]["rows"] == 9
    assert found["out_of_memory"]["said_to_fit"] == [] and not found["not_priced"]
    assert found["memory"]["each_source"] < 0.10 and found["time"]["each_source"] < 0.15


@pytest.mark.slow
def test_the_published_figures_are_those_of_the_code() -> None:
    kept = json.loads((RESULTS / "foreign-configs-2026-11-28.json").read_text(encoding="utf-8"))
    found = figures(judged(published_rows()))
    for what in ("memory", "time"):
        assert found[what]["each_source"] == pytest.approx(kept[what]["each_source"], rel=1e-6)
    assert found["ran"] == kept["ran"] and found["out_of_memory"] == kept["out_of_memory"]
