"""Samples while a run trains: the same text from every layout, and training's numbers as without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.data.preparation.tokens import train_bpe
from plait.parallel.communicator import ONE_PROCESS
from plait.planner.plan import Plan
from plait.recipe.schema import RunConfig
from plait.trainer.assemble import Assembly, assemble
from plait.trainer.samples import SAMPLE_TEMPERATURE, SAMPLE_TOKENS, _whole_words, load_sampler
from plait.trainer.state import TrainState
from tests.trainer.rank_entries import sampled_losses
from tests.trainer.tiny import make_tiny

STEPS = 2
PIPELINE = {"pipeline": 2, "stage_layers": [1, 1]}
OF_TWO = {
    "pipeline": PIPELINE,
    "replicate": {"replicate": 2},
    "shard optimizer": {"shard": 2},
    "shard parameters": {"shard": 2, "shard_what": "parameters"},
    "context": {"context": 2},
    "tensor": {"tensor": 2},
}
OF_FOUR = {
    "pipeline, tensor": {**PIPELINE, "tensor": 2},
    "zero-bubble, replicate": {**PIPELINE, "schedule": "zero-bubble", "replicate": 2},
    "context, shard parameters": {"context": 2, "shard": 2, "shard_what": "parameters"},
    "interleaved, shard": {"pipeline": 2, "stage_layers": [1, 1, 1, 1], "schedule": "interleaved", "shard": 2},
}


def one_process(config: RunConfig, plan: Plan) -> Assembly:
    return assemble(config, plan, sums=ONE_PROCESS, stages=())


def told_of(run_ranks: Any, folder: Path, layouts: dict[str, dict[str, Any]], ranks: int) -> dict[int, list[Any]]:
    asked = json.dumps({"folder": str(folder), "steps": STEPS, "layouts": list(layouts.values())})
    return {rank: values["cases"] for rank, values in run_ranks("sample_and_lose", asked, ranks).items()}


def check(told: dict[int, list[Any]], layouts: dict[str, dict[str, Any]], wanted: list[list[str]]) -> None:
    for number, layout in enumerate(layouts):
        for rank, cases in told.items():
            without, sampled = cases[2 * number], cases[2 * number + 1]
            assert sampled["losses"] == without["losses"], f"{layout}: other numbers on rank {rank}"
            assert sampled["random"] == without["random"], f"{layout}: other random state on rank {rank}"
            assert sampled["texts"] == (wanted if rank == 0 else []), layout


def test_two_workers_write_what_one_process_writes_and_learn_the_same(run_ranks: Any, tmp_path: Path) -> None:
    config, plan = make_tiny(tmp_path)
    wanted = sampled_losses(one_process(config, plan), STEPS, sampled=True)["texts"]
    assert len(wanted) == 2 and wanted[0] != wanted[1] and all(text for _, text in wanted)
    check(told_of(run_ranks, tmp_path, OF_TWO, 2), OF_TWO, wanted)


@pytest.mark.slow
def test_four_workers_write_what_one_process_writes(run_ranks: Any, tmp_path: Path) -> None:
    config, plan = make_tiny(tmp_path, "model.layers=4")
    layouts = {
        name: {**one, "stage_layers": [2, 2]} if one.get("stage_layers") == [1, 1] else one
        for name, one in OF_FOUR.items()
    }
    wanted = sampled_losses(one_process(config, plan), STEPS, sampled=True)["texts"]
    check(told_of(run_ranks, tmp_path, layouts, 4), layouts, wanted)


@pytest.mark.slow
def test_experts_on_two_workers_write_what_one_process_writes(run_ranks: Any, tmp_path: Path) -> None:
    config, plan = make_tiny(tmp_path, "model.experts=4", "model.experts_per_token=2")
    layouts = {"expert": {"replicate": 2, "expert": 2}, "tensor": {"tensor": 2}}
    wanted = sampled_losses(one_process(config, plan), STEPS, sampled=True)["texts"]
    check(told_of(run_ranks, tmp_path, layouts, 2), layouts, wanted)


def test_tokens_are_drawn_from_the_models_own_distribution(tmp_path: Path) -> None:
    """Against the whole model's scores, read all at once, with the same noise."""
    config, plan = make_tiny(tmp_path, "train.sequence=128", "train.batch_tokens=896")
    assembly = one_process(config, plan)
    state, _ = assembly.step(TrainState())
    sampler = load_sampler(assembly, "abc", 5, "refuse", ONE_PROCESS)
    report = sampler.sample(assembly, state.step)
    assert report is not None and report.prompt == "abc" and report.step == 1
    noise, model, tokens = torch.Generator().manual_seed(5), assembly.model.chunks[0], list(sampler.prompt_ids)
    with torch.inference_mode():
        for _ in range(SAMPLE_TOKENS):
            scores_v = model.logits(model(torch.tensor([tokens]))[-1])[: assembly.corpus.vocabulary]
            drawn_v = scores_v / SAMPLE_TEMPERATURE - torch.empty(len(scores_v)).exponential_(generator=noise).log()
            tokens.append(int(drawn_v.argmax()))
            if tokens[-1] == assembly.corpus.eot:
                break
    decode = sampler.decode
    assembly.loader.close()
    assert report.text == decode(tokens).removeprefix(decode(sampler.prompt_ids)).removesuffix("<|endoftext|>")


def test_scores_that_are_not_finite_end_a_sample(tmp_path: Path) -> None:
    assembly = one_process(*make_tiny(tmp_path))
    sampler = load_sampler(assembly, None, 1, "refuse", ONE_PROCESS)
    next(assembly.model.chunks[0].parameters()).data.fill_(float("nan"))
    report = sampler.sample(assembly, 3)
    assembly.loader.close()
    assert report is not None and report.text == ""


def test_a_prompt_of_held_out_text_has_whole_words() -> None:
    tokenizer = train_bpe(["wonders of the world abroad, than living dully"], 280)

    def prompt_of(text: str) -> str:
        return tokenizer.decode(_whole_words(tokenizer.encode(text), tokenizer))

    assert prompt_of("e wonders of the world abroad,\nThan, living d") == "wonders of the world abroad,\nThan, living"
    assert prompt_of("wonders of") == "wonders of" and prompt_of("") == ""
