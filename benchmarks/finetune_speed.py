"""LoRA by plait beside TRL's SFTTrainer with PEFT, on this processor, in one run.

    make smollm2 chats
    pip install -e ".[bench]"
    python -m benchmarks.finetune_speed             # writes results/finetune-speed-DATE.json
    python -m benchmarks.finetune_speed --rounds 1 --steps 4 --smoke    # the same path, shorter; saves nothing

Twice at equal precision, float32 and bf16: the same model, adapters with the same first weights, the same examples in
the same steps, packed, the same optimizer, nothing recomputed. TRL gets the fastest of its settings here: rows at once,
one process or one a core. Losses of all steps must be equal within EQUAL_WITHIN before anything is timed. Then once as
a user runs each: plait's recipe names model, method and data; TRL's script model, data and the same adapter.
Contenders take turns, and ratios are taken within rounds (pairing.py).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from benchmarks.finetune_turns import FinetuningTurn, plait_turn, read_steps, trl_turn
from benchmarks.machine import describe
from benchmarks.pairing import alternate, save
from plait.commands.preparing.base import model_folder
from plait.planner.plan import Plan
from plait.working_folder import WorkingFolder

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "models" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
CHATS = ROOT / "models" / "chats.jsonl"
Precision = Literal["float32", "bf16"]
EQUAL_WITHIN: dict[Precision, float] = {"float32": 1e-4, "bf16": 1e-2}
"""Relative, in each step's loss."""
LR = 2e-4
RECIPE = """
[model]
from = "{model}"

[finetune]
method = "lora"

[data]
files = "{chats}"
overlong = "drop"

[train]
budget = "{steps} steps"
"""
SAME = """precision = "{precision}"
sequence = 256

[optimizer]
lr = {lr}
schedule = "constant"
warmup_steps = 0

[layout]
replicate = {cores}
recompute = "none"

[report]
evaluate = "never"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlSettings:
    """How TRL is run: processes, and packed rows that each takes at a time."""

    ranks: int
    rows_at_once: int

    def __str__(self) -> str:
        return f"{self.ranks} process{'es' if self.ranks > 1 else ''}, {self.rows_at_once} rows at once"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What is compared, and how long."""

    place: Path
    """A folder for all that is made on the way."""
    model: Path
    chats: Path
    rounds: int
    steps: int
    cores: int


def main() -> int:
    """Print each comparison's table and save them."""
    parser = argparse.ArgumentParser(description="LoRA by plait beside TRL and PEFT")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--chats", type=Path, default=CHATS)
    parser.add_argument("--only", choices=["float32", "bf16", "default"], action="append")
    parser.add_argument("--smoke", action="store_true")
    asked = parser.parse_args()
    for file, make in ((asked.model, "smollm2"), (asked.chats, "chats")):
        if not file.exists():
            sys.exit(f"plait: there is no {file}; bring it with: make {make}")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = model_folder(str(asked.model.absolute()), WorkingFolder(Path(folder)))
        bench = Bench(
            place=Path(folder),
            model=model,
            chats=asked.chats.absolute(),
            rounds=asked.rounds,
            steps=asked.steps,
            cores=len(os.sched_getaffinity(0)),
        )
        for name in asked.only or ("float32", "bf16", "default"):
            results[name] = by_default(bench) if name == "default" else at_equal_precision(bench, name)
            print(f"\n{name}\n{results[name]['table']}", flush=True)
    if not asked.smoke:
        named = {"model": asked.model.name, "chats": asked.chats.name, "steps": asked.steps, "rounds": asked.rounds}
        print(f"\nwrote {save('finetune-speed', {'machine': describe(), **named, 'results': results})}")
    return 0


def at_equal_precision(bench: Bench, precision: Precision) -> dict[str, Any]:
    """The same numbers by both, TRL with the fastest of its settings."""
    recipe = bench.place / f"{precision}.toml"
    common = RECIPE.format(model=bench.model, chats=bench.chats, steps=bench.steps)
    recipe.write_text(common + SAME.format(precision=precision, lr=LR, cores=bench.cores))
    first, plan = plait_turn(bench.place, recipe, f"{precision}-first")
    data = bench.place / f"{precision}.json"
    data.write_text(json.dumps([row for rows in read_steps(bench.place, plan) for row in rows]))
    tried = dict[TrlSettings, FinetuningTurn]()
    for settings in tuned(bench, plan):
        job = trl_job(bench, plan, precision, data, settings)
        turn = trl_turn(bench.place / f"{precision}-{settings}", job, settings.ranks)
        tried[settings] = replace(turn, tokens=first.tokens)  # it counts an example's last one, which is only a target
        require_equal(first, tried[settings], precision, settings)
    best = max(tried, key=lambda settings: tried[settings].tokens_per_s)
    for settings, turn in tried.items():
        print(f"{precision}, TRL with {settings}: {turn.tokens_per_s:,.0f} tokens/s", flush=True)
    count = iter(range(1_000_000))

    def take(name: str) -> FinetuningTurn:
        number = next(count)
        if name == "plait":
            return plait_turn(bench.place, recipe, f"{precision}-{number}")[0]
        job = trl_job(bench, plan, precision, data, best)
        return replace(trl_turn(bench.place / f"{precision}-{number}", job, best.ranks), tokens=first.tokens)

    told = compared(alternate(("plait", "trl"), bench.rounds, take))
    shown = {
        "window": plan.job.sequence,
        "windows a step": plan.job.batch_sequences,
        "plait": str(plan.placement.layout),
        "TRL": str(best),
    }
    return {**told, "settings": shown, "losses": {"plait": first.losses, "trl": tried[best].losses}}


def tuned(bench: Bench, plan: Plan) -> list[TrlSettings]:
    """The settings of TRL that are tried: one process with all threads, or one a core; rows one by one, or together."""
    found = list[TrlSettings]()
    for ranks in sorted({1, bench.cores}):
        own = plan.job.batch_sequences // ranks
        if plan.job.batch_sequences % ranks == 0:
            found += [TrlSettings(ranks=ranks, rows_at_once=rows) for rows in sorted({1, 2, own}) if own % rows == 0]
    return found


def trl_job(bench: Bench, plan: Plan, precision: Precision, data: Path, settings: TrlSettings) -> dict[str, object]:
    """What peers/trl_sft.py is to do. In bf16 the frozen weights are loaded so: nothing has to be cast in a step."""
    adapter = plan.job.shape.adapter
    assert adapter is not None
    return {
        "kind": "rows",
        "model": str(bench.model),
        "data": str(data),
        "steps": plan.job.steps,
        "rows_at_once": settings.rows_at_once,
        "accumulation": plan.job.batch_sequences // settings.ranks // settings.rows_at_once,
        "threads": max(1, bench.cores // settings.ranks),
        "precision": precision,
        "dtype": "bfloat16" if precision == "bf16" else "float32",
        "rank": adapter.rank,
        "alpha": adapter.alpha,
        "lr": LR,
        "seed": 1,
    }


def require_equal(ours: FinetuningTurn, theirs: FinetuningTurn, precision: Precision, settings: TrlSettings) -> None:
    """End the benchmark where any step's losses differ: it would compare other mathematics."""
    worst = max(abs(one / other - 1) for one, other in zip(ours.losses, theirs.losses, strict=True))
    if not worst <= EQUAL_WITHIN[precision]:
        sys.exit(f"TRL with {settings} differs by {worst:.1e} in {precision}: {theirs.losses} and {ours.losses}")


def by_default(bench: Bench) -> dict[str, Any]:
    """Each as a user runs it who names model, method and data."""
    recipe = bench.place / "default.toml"
    recipe.write_text(RECIPE.format(model=bench.model, chats=bench.chats, steps=bench.steps))
    _, plan = plait_turn(bench.place, recipe, "default-first")  # its plan is made, and kept for the turns
    assert plan.job.shape.adapter is not None
    chats, data = [json.loads(line) for line in bench.chats.read_text().splitlines()], bench.place / "default.json"
    data.write_text(json.dumps(chats))
    adapter = {"rank": plan.job.shape.adapter.rank, "alpha": plan.job.shape.adapter.alpha}
    job = {"kind": "chats", "model": str(bench.model), "data": str(data), "steps": bench.steps, **adapter}
    job |= {"threads": bench.cores, "dtype": "float32", "seed": 1}
    count = iter(range(1_000_000))

    def turn(name: str) -> FinetuningTurn:
        number = next(count)
        if name == "plait":
            return plait_turn(bench.place, recipe, f"default-{number}")[0]
        return trl_turn(bench.place / f"default-{number}", job, 1)

    told = compared(alternate(("plait", "trl"), bench.rounds, turn))
    return {
        **told,
        "settings": {
            "plait": f"{plan.placement.layout}, {plan.arithmetic.precision}",
            "TRL": "SFTConfig() and LoraConfig",
        },
    }


def compared(turns: dict[str, list[FinetuningTurn]]) -> dict[str, Any]:
    """The rounds' ratios, their table, and every turn."""
    pairs = list(zip(turns["plait"], turns["trl"], strict=True))
    ratios = [ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in pairs]
    memory = [ours.peak_bytes / theirs.peak_bytes for ours, theirs in pairs]
    lines = ["| | tokens/s | peak memory, MB |", "| --- | --- | --- |"]
    for name, own in turns.items():
        speed, peak = median(one.tokens_per_s for one in own), median(one.peak_bytes for one in own)
        lines.append(f"| {name} | {speed:,.0f} | {peak / 1e6:,.0f} |")
    lines.append(
        f"| plait ÷ trl | {median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f}) | "
        f"{median(memory):.2f} ({min(memory):.2f} … {max(memory):.2f}) |"
    )
    return {
        "table": "\n".join(lines),
        "speed_ratios": ratios,
        "memory_ratios": memory,
        "turns": {name: [asdict(one) for one in own] for name, own in turns.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
