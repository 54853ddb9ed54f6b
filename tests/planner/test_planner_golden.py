"""What plait says on machines that are not here, word for word; UPDATE_GOLDEN=1 writes the texts again for review."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plait.planner.resolve.resolve import plan_summary
from tests.matrix import few_fast
from tests.planner.machines import CHATS, EIGHT_H100, LAPTOP, ONE_H100, PLAYS, SERVER, STORIES, WEB, planned, recipe

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = {
    "laptop-plays-4-minutes": (LAPTOP, PLAYS, ("train.budget=4 minutes",)),
    "server-stories-1-hour": (SERVER, STORIES, ("train.budget=1 hour",)),
    "server-plays-named-layout": (SERVER, PLAYS, ("train.budget=500 steps", "layout.replicate=4", "model.size=3M")),
    "laptop-chats-lora": (LAPTOP, CHATS, ("model.from=base", "finetune.method=lora")),
    "h100-chats-full": (ONE_H100, CHATS, ("model.from=base", "finetune.method=full")),
    "h100-web-125m": (ONE_H100, WEB, ("model.size=125M", "train.sequence=1024")),
    "8-h100-web-20b-tokens": (EIGHT_H100, WEB, ("train.budget=20B tokens", "model.size=1B")),
}

FAST = ("laptop-plays-4-minutes", "server-plays-named-layout", "laptop-chats-lora", "8-h100-web-20b-tokens")


@pytest.mark.parametrize("name", few_fast(CASES, *FAST))
def test_the_plan_and_its_reasons(name: str, tmp_path: Path) -> None:
    machine, facts, overrides = CASES[name]
    plan = planned(recipe(tmp_path, *overrides), facts, machine, why_this_layout="searched")
    layout, numbers, cadence = plan.placement.layout, plan.arithmetic, plan.cadence
    told = [
        f"model    {plan_summary(plan)}",
        f"layout   {layout}: {plan.world_size} × {plan.placement.threads} threads, {numbers.precision}, "
        f"compile {numbers.compile}",
        f"micro    {plan.placement.micro_sequences} of {plan.job.batch_sequences} sequences",
        f"reports  every {cadence.report_every_steps} steps, evaluation every {cadence.evaluate_every_steps}, "
        f"checkpoint every {cadence.checkpoint_every}",
        f"adamw    {plan.job.optimizer}",
        *(f"         · {reason}" for reason in plan.reasons),
    ]
    text, golden = "\n".join(told) + "\n", GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text(), f"{golden} says otherwise; if the new text is right, write it by UPDATE_GOLDEN=1"
