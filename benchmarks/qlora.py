"""QLoRA of a real model: losses and memory of six layouts beside one process, and one process beside bitsandbytes.

    make smollm2 chats
    python -m benchmarks.qlora                      # all of it; writes results/qlora-DATE.json
    python -m benchmarks.qlora --only layouts       # needs no quiet machine
    python -m benchmarks.qlora --only speed         # needs one, and PYTHONPATH with bitsandbytes
    python -m benchmarks.qlora --model models/gemma3/gemma-3-270m-q4_k_m.gguf --smoke   # saves nothing

In float32, nothing recomputed, AdamW with a constant rate. A layout's losses are compared step by step with those of
one process, its peak of tensors with the plan's. bitsandbytes' side is PEFT in a plain loop (peers/peft_qlora.py) with
the same first adapters, examples and steps, in one process with all threads and the fastest number of rows at once;
plait's is one process, and a worker a core. Before anything is timed, losses must be equal within EQUAL_WITHIN:
bitsandbytes gives about one block's scale in five hundred a neighbouring code. Contenders take turns, and ratios are
taken within rounds (pairing.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import tomli_w

from benchmarks.finetune_turns import ROOT, FinetuningTurn, plait_turn, read_steps, run_watched
from benchmarks.machine import describe
from benchmarks.pairing import alternate, save
from plait.commands.preparing.base import model_folder
from plait.interop.base_model import read_base_model
from plait.planner.plan import Plan
from plait.working_folder import WorkingFolder

MODEL = ROOT / "models" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
CHATS = ROOT / "models" / "chats.jsonl"
WINDOWS, SEQUENCE, LR = 14, 128, 2e-4
ALONE = "one process"
LOSS_BAR, MEMORY_BAR = 1e-6, 0.05
EQUAL_WITHIN = 2e-3
"""Relative, in each step's loss, beside bitsandbytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutResult:
    """A layout's losses beside those of one process, and its memory beside the plan's."""

    name: str
    losses: tuple[float, ...]
    loss_error: float
    """The largest of its steps, relative."""
    tensor_bytes: int
    """Peak of the fullest rank."""
    planned_bytes: float

    @property
    def memory_error(self) -> float:
        return self.planned_bytes / self.tensor_bytes - 1

    @property
    def met(self) -> bool:
        return self.loss_error <= LOSS_BAR and abs(self.memory_error) <= MEMORY_BAR


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What is trained, and where."""

    place: Path
    """A folder for all that is made on the way."""
    model: Path
    chats: Path
    steps: int
    rounds: int
    cores: int


def main() -> int:
    """Print what was measured and save it; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description="QLoRA: layouts, and beside bitsandbytes")
    parser.add_argument("--only", choices=["layouts", "speed"])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--chats", type=Path, default=CHATS)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="saves nothing")
    asked = parser.parse_args()
    for file, make in ((asked.model, "smollm2"), (asked.chats, "chats")):
        if not file.exists():
            sys.exit(f"plait: there is no {file}; bring it with: make {make}")
    if asked.only != "layouts" and importlib.util.find_spec("bitsandbytes") is None:
        sys.exit("plait: bitsandbytes is not here; pip install --target DIR --no-deps bitsandbytes, and PYTHONPATH=DIR")
    results: dict[str, Any] = {}
    met = True
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        model = model_folder(str(asked.model.absolute()), WorkingFolder(place))
        cores = len(os.sched_getaffinity(0))
        chats = asked.chats.absolute()
        bench = Bench(place=place, model=model, chats=chats, steps=asked.steps, rounds=asked.rounds, cores=cores)
        if asked.only != "speed":
            layouts = compare_layouts(bench)
            met = all(one.met for one in layouts)
            results["layouts"] = [asdict(one) | {"memory_error": one.memory_error} for one in layouts]
        if asked.only != "layouts":
            results["speed"] = beside_bitsandbytes(bench)
            print(results["speed"]["table"])
    if not asked.smoke:
        named = {"model": asked.model.name, "steps": asked.steps, "windows": WINDOWS, "sequence": SEQUENCE}
        print(f"wrote {save('qlora', {'machine': describe(), **named, **results})}")
    return int(not met)


def layouts_of(model: Path) -> dict[str, Mapping[str, Any]]:
    """One process, and the layouts that are compared with it. SmolLM2-135M has nine heads, which three ranks share."""
    heads = read_base_model(model).shape.heads
    tensor = next(ranks for ranks in range(2, heads + 1) if heads % ranks == 0)
    return {
        ALONE: {"replicate": 1},
        "replicate 2": {"replicate": 2},
        "shard 2, optimizer": {"shard": 2, "shard_what": "optimizer"},
        "shard 2, parameters": {"shard": 2, "shard_what": "parameters"},
        f"tensor {tensor}": {"tensor": tensor},
        "pipeline 2": {"pipeline": 2},
        "unequal 1 : 0.4": {"replicate": 2, "shares": [10, 4]},
    }


def compare_layouts(bench: Bench) -> list[LayoutResult]:
    """Every layout beside one process; prints a line for each."""
    found = list[LayoutResult]()
    alone: tuple[float, ...] = ()
    for number, (name, layout) in enumerate(layouts_of(bench.model).items()):
        turn, plan = plait_turn(bench.place, write_recipe(bench, f"layout-{number}", layout), f"layout-{number}")
        alone = alone or turn.losses
        receipt = json.loads((bench.place / "runs" / f"layout-{number}" / "receipt.json").read_text())
        assert plan.forecast is not None
        one = LayoutResult(
            name=name,
            losses=turn.losses,
            loss_error=max(abs(own / other - 1) for own, other in zip(turn.losses, alone, strict=True)),
            tensor_bytes=max(receipt["peak_tensor_bytes"]),
            planned_bytes=plan.forecast.tensor_bytes,
        )
        found.append(one)
        print(
            f"{name:22} losses {turn.losses[0]:.6f} … {turn.losses[-1]:.6f}, off by {one.loss_error:.1e}; "
            f"tensors {one.tensor_bytes / 1e6:,.0f} MB, the plan's {one.memory_error:+.1%}",
            flush=True,
        )
    return found


def write_recipe(bench: Bench, name: str, layout: Mapping[str, Any]) -> Path:
    """A recipe of this layout."""
    values = {
        "model": {"from": str(bench.model)},
        "finetune": {"method": "qlora"},
        "data": {"files": str(bench.chats), "overlong": "drop"},
        "train": {
            "budget": f"{bench.steps} steps",
            "precision": "float32",
            "sequence": SEQUENCE,
            "batch_tokens": WINDOWS * SEQUENCE,
        },
        "optimizer": {"lr": LR, "schedule": "constant", "warmup_steps": 0},
        "layout": {"recompute": "none", **layout},
        "checkpoint": {"every": "never"},
        "report": {"evaluate": "never"},
    }
    recipe = bench.place / f"{name}.toml"
    recipe.write_text(tomli_w.dumps(values))
    return recipe


def beside_bitsandbytes(bench: Bench) -> dict[str, Any]:
    """plait in one process and in a worker a core, and PEFT with the fastest number of rows at once."""
    recipes = {
        "plait, one process": write_recipe(bench, "alone", {"replicate": 1}),
        f"plait, {bench.cores} workers": write_recipe(bench, "workers", {"replicate": bench.cores}),
    }
    first, plan = plait_turn(bench.place, recipes["plait, one process"], "alone-first")
    data = bench.place / "rows.json"
    data.write_text(json.dumps(read_steps(bench.place, plan)))
    tried = {rows: peft_turn(bench, plan, data, rows, f"peft-{rows}") for rows in (1, 2, WINDOWS)}
    for rows, turn in tried.items():
        worst = max(abs(one / other - 1) for one, other in zip(first.losses, turn.losses, strict=True))
        print(
            f"PEFT with {rows} rows at once: {turn.tokens_per_s:,.0f} tokens/s, losses off by {worst:.1e}", flush=True
        )
        if not worst <= EQUAL_WITHIN:
            sys.exit(f"losses differ: {turn.losses} by bitsandbytes, {first.losses} by plait")
    best = max(tried, key=lambda rows: tried[rows].tokens_per_s)
    count = iter(range(1_000_000))

    def take(name: str) -> FinetuningTurn:
        number = next(count)
        if name in recipes:
            return plait_turn(bench.place, recipes[name], f"turn-{number}")[0]
        # An example's last token is only a target: plait does not count it.
        return replace(peft_turn(bench, plan, data, best, f"turn-{number}"), tokens=first.tokens)

    turns = alternate([*recipes, "PEFT"], bench.rounds, take)
    return {
        "table": speed_table(turns),
        "rows_at_once": best,
        "losses": {"plait": first.losses, "PEFT": tried[best].losses},
        "turns": {name: [asdict(one) for one in own] for name, own in turns.items()},
    }


def peft_turn(bench: Bench, plan: Plan, data: Path, rows_at_once: int, name: str) -> FinetuningTurn:
    """One turn of peers/peft_qlora.py in a process of its own."""
    adapter = plan.job.shape.adapter
    assert adapter is not None
    folder = bench.place / name
    folder.mkdir()
    job = {
        "folder": str(folder),
        "model": str(bench.model),
        "data": str(data),
        "steps": plan.job.steps,
        "rows_at_once": rows_at_once,
        "threads": bench.cores,
        "rank": adapter.rank,
        "alpha": adapter.alpha,
        "lr": LR,
        "seed": 1,
    }
    (folder / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-m", "benchmarks.peers.peft_qlora", str(folder / "job.json")]
    peak = run_watched([command], ROOT, [{}], folder / "peft.log")
    answer = json.loads((folder / "answer-0.json").read_text())
    return FinetuningTurn(
        losses=tuple(answer["losses"]),
        tokens=tuple(map(int, answer["tokens"])),
        step_s=tuple(answer["step_s"]),
        peak_bytes=peak,
    )


def speed_table(turns: Mapping[str, Sequence[FinetuningTurn]]) -> str:
    """Every contender's rate and memory, and its rate over PEFT's of the same round."""
    lines = ["| | tokens/s | peak memory, MB | ÷ PEFT |", "| --- | --- | --- | --- |"]
    for name, own in turns.items():
        ratios = [one.tokens_per_s / peer.tokens_per_s for one, peer in zip(own, turns["PEFT"], strict=True)]
        speed, peak = median(one.tokens_per_s for one in own), median(one.peak_bytes for one in own)
        spread = f"{median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f})"
        lines.append(f"| {name} | {speed:,.0f} | {peak / 1e6:,.0f} | {spread} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
