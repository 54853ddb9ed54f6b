"""How much a minute of training teaches: one choice of the recipe at a time, to a held-out loss.

    python -m benchmarks.time_to_loss run [--length 1|4|12] [--seeds 1 2 3] [--share 1.0] CHOICE ...
    python -m benchmarks.time_to_loss screen          # all choices at the one-minute length, one seed; skips known rows
    python -m benchmarks.time_to_loss cost CHOICE ... # a step's processor seconds over the first choice's, in turns
    python -m benchmarks.time_to_loss report          # a table of all rows

Machines are noisy and shared, so nothing is compared by the clock. A row is a run of a fixed number of tokens of recipe
01's text by one thread: its curve of held-out losses in nats a byte, the same to the bit each time, and the processor
seconds of its median step. A length in minutes is about the model and the tokens of such a budget on two slow cores;
they are fixed, so that rows stay comparable. `--share 0.7` trains for 70 % of the tokens, with the schedule as short:
what a choice needs to reach another one's loss. Rows are added to benchmarks/results/time-to-loss.json as they are
ready, so a later session goes on where this one stopped.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from benchmarks.machine import ROOT, describe
from plait.commands.preparing.corpus import corpus_facts, data_request
from plait.data.preparation.prepare import prepare_corpus
from plait.data.shards import Corpus, open_corpus
from plait.machines.machine import Machine
from plait.model.matmul import select_matmul_library
from plait.parallel.communicator import ONE_PROCESS
from plait.planner.derive.resources import Resources
from plait.planner.plan import Plan
from plait.planner.resolve.resolve import draft, settle
from plait.recipe.load import load_recipe
from plait.recipe.schema import RunConfig
from plait.trainer.assemble import Assembly, assemble
from plait.trainer.state import TrainState

RECIPE = ROOT / "recipes" / "01-shakespeare.toml"
RESULTS = ROOT / "benchmarks" / "results" / "time-to-loss.json"
MACHINE = Machine(device="cpu", name="one core", devices=1, cores=1, memory_bytes=2**33, versions=(("torch", "any"),))
"""What plans are made for: nothing of the machine that runs them enters."""
POINTS = (0.25, 0.5, 0.75, 0.9, 1.0)
"""Shares of a run at which the whole held-out text is read."""
OUTPUTS = ("attention.o.weight", "feedforward.down.weight")
"""What writes into the stream between layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """A run's size and tokens."""

    size: str
    steps: int
    batch_tokens: int
    lr: float
    """Of which choices name multiples: what plait derived for AdamW when the first rows were made (at most 4e-3 at the
    usual batch)."""


LENGTHS: Mapping[str, Length] = {
    "1": Length(size="250K", steps=600, batch_tokens=1024, lr=0.00236),
    "4": Length(size="250K", steps=940, batch_tokens=4096, lr=0.00349),
    "12": Length(size="500K", steps=1700, batch_tokens=4096, lr=0.0028),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A change of the recipe: settings, and learning rates as multiples of the length's."""

    settings: tuple[str, ...] = ()
    lr: float | None = 1.0
    """None: what plait derives."""
    adamw_lr: float | None = None
    """Of what Muon does not update; None: as `lr`."""
    batch: float = 1.0
    """Tokens of a step, as a multiple; with as many tokens in all."""
    average: float = 0.0
    """Of an exponential moving average of the weights, which is evaluated at the end; 0: none."""
    zero_outputs: bool = False
    """Whether the matrices that write into the stream begin at zero."""


ADAMW = ("optimizer.kind=adamw",)
MUON = ("optimizer.kind=muon",)
LINEAR = ("optimizer.schedule=linear",)
CHOICES: Mapping[str, Choice] = {
    "derived": Choice(lr=None),
    "adamw derived": Choice(settings=ADAMW, lr=None),
    "adamw": Choice(settings=ADAMW),
    "adamw linear": Choice(settings=(*ADAMW, *LINEAR)),
    "adamw wsd": Choice(
        settings=(
            *ADAMW,
            "optimizer.schedule=wsd",
        )
    ),
    "adamw x2": Choice(settings=ADAMW, lr=2.0),
    "adamw x4": Choice(settings=ADAMW, lr=4.0),
    "adamw x8": Choice(settings=ADAMW, lr=8.0),
    "adamw x2 linear": Choice(settings=(*ADAMW, *LINEAR), lr=2.0),
    "adamw x4 linear": Choice(settings=(*ADAMW, *LINEAR), lr=4.0),
    "adamw x8 linear": Choice(settings=(*ADAMW, *LINEAR), lr=8.0),
    "muon": Choice(settings=MUON),
    "muon linear": Choice(settings=(*MUON, *LINEAR)),
    "muon x2 linear": Choice(settings=(*MUON, *LINEAR), lr=2.0),
    "muon x4 linear": Choice(settings=(*MUON, *LINEAR), lr=4.0),
    "muon x8 linear": Choice(settings=(*MUON, *LINEAR), lr=8.0),
    "muon x2 cosine": Choice(settings=MUON, lr=2.0),
    "muon x4 cosine": Choice(settings=MUON, lr=4.0),
    "muon x8 cosine": Choice(settings=MUON, lr=8.0),
    "muon x12 cosine": Choice(settings=MUON, lr=12.0),
    "muon x2 wsd": Choice(settings=(*MUON, "optimizer.schedule=wsd"), lr=2.0),
    "muon x4 linear, rest x1": Choice(settings=(*MUON, *LINEAR), lr=4.0, adamw_lr=1.0),
    "muon x4 linear, rest x2": Choice(settings=(*MUON, *LINEAR), lr=4.0, adamw_lr=2.0),
    "muon x2 linear, rest x4": Choice(settings=(*MUON, *LINEAR), lr=2.0, adamw_lr=4.0),
    "muon x8, no decay": Choice(settings=(*MUON, "optimizer.weight_decay=0"), lr=8.0),
    "muon x8, betas 0.8 0.95": Choice(settings=(*MUON, "optimizer.betas=[0.8,0.95]"), lr=8.0),
    "muon x8, betas 0.9 0.99": Choice(settings=(*MUON, "optimizer.betas=[0.9,0.99]"), lr=8.0),
    "muon x8, betas 0.9 0.999": Choice(settings=(*MUON, "optimizer.betas=[0.9,0.999]"), lr=8.0),
    "muon x8, betas 0.9 0.99, qk norm": Choice(
        settings=(*MUON, "optimizer.betas=[0.9,0.99]", "model.qk_norm=true"), lr=8.0
    ),
    "muon x8, betas 0.9 0.999, qk norm": Choice(
        settings=(*MUON, "optimizer.betas=[0.9,0.999]", "model.qk_norm=true"), lr=8.0
    ),
    "adamw x4, betas 0.9 0.99": Choice(settings=(*ADAMW, "optimizer.betas=[0.9,0.99]"), lr=4.0),
    "muon x8, momentum 0.9": Choice(settings=(*MUON, "optimizer.momentum=0.9"), lr=8.0),
    "muon x8, batch x2": Choice(settings=MUON, lr=8.0, batch=2.0),
    "muon x8, batch x0.5": Choice(settings=MUON, lr=8.0, batch=0.5),
    "muon x8, qk norm": Choice(settings=(*MUON, "model.qk_norm=true"), lr=8.0),
    "muon x8, zero outputs": Choice(settings=MUON, lr=8.0, zero_outputs=True),
    "muon x8, average 0.98": Choice(settings=MUON, lr=8.0, average=0.98),
    "muon x8, wsd": Choice(settings=(*MUON, "optimizer.schedule=wsd"), lr=8.0),
    "muon x8, qk norm, zero outputs": Choice(settings=(*MUON, "model.qk_norm=true"), lr=8.0, zero_outputs=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run."""

    choice: str
    minutes: str
    seed: int
    share: float
    parameters: int
    tokens: tuple[int, ...]
    nats_per_byte: tuple[float, ...]
    step_s: float
    """Processor seconds of the median step."""
    steps: int
    settings: Mapping[str, object]
    """The optimizer as planned, and in what numbers Muon orthogonalizes."""
    measured: Mapping[str, object] = field(default_factory=dict)
    """Date, commit and processor."""

    @property
    def key(self) -> tuple[str, str, int, float]:
        return self.choice, self.minutes, self.seed, self.share

    @property
    def seconds(self) -> float:
        """Processor seconds of all steps."""
        return self.steps * self.step_s


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("run", "screen", "cost", "report"))
    parser.add_argument("choices", nargs="*", metavar="CHOICE", help=f"of {', '.join(CHOICES)}")
    parser.add_argument("--length", choices=list(LENGTHS), default="1")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--share", type=float, default=1.0)
    flags = parser.parse_intermixed_args()
    if unknown := set(flags.choices) - CHOICES.keys():
        parser.error(f"no choice is named {', '.join(sorted(unknown))}")
    if flags.what == "report":
        print(report(read_rows()))
        return
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    select_matmul_library("onednn")
    with tempfile.TemporaryDirectory() as folder:
        corpus = _corpus(Path(folder))
        if flags.what == "cost":
            print_costs(flags.choices or ["adamw", "muon"], flags.length, corpus)
            return
        for name in flags.choices or list(CHOICES):
            for seed in flags.seeds:
                if (name, flags.length, seed, flags.share) in {row.key for row in read_rows()}:
                    continue
                row = train(name, flags.length, seed, flags.share, corpus)
                add_row(row)
                print(line(row), flush=True)


def train(name: str, minutes: str, seed: int, share: float, corpus: Corpus) -> Row:
    """Train by a choice, and read the held-out text at POINTS."""
    choice = CHOICES[name]
    config, plan = planned(choice, LENGTHS[minutes], seed, share, corpus)
    assembly = assemble(config, plan, sums=ONE_PROCESS, stages=())
    (model,) = assembly.model.chunks
    weights = dict(model.named_parameters())
    if choice.zero_outputs:
        for one, weight in weights.items():
            if one.endswith(OUTPUTS):
                torch.nn.init.zeros_(weight)
    averages = {one: weight.detach().clone() for one, weight in weights.items()} if choice.average else {}
    state, spent, tokens, losses = TrainState(), list[float](), list[int](), list[float]()
    points = {max(1, round(point * plan.job.steps)) for point in POINTS}
    while state.step < plan.job.steps:
        began = time.thread_time()
        state, _ = assembly.step(state)
        for one, average in averages.items():
            average.lerp_(weights[one].detach(), 1 - choice.average)
        spent.append(time.thread_time() - began)
        if state.step == plan.job.steps:
            for one, average in averages.items():
                weights[one].detach().copy_(average)
        if state.step in points:
            tokens.append(state.step * plan.job.batch_tokens)
            losses.append(_heldout_loss(assembly))
    assembly.loader.close()
    optimizer = plan.job.optimizer
    return Row(
        choice=name,
        minutes=minutes,
        seed=seed,
        share=share,
        parameters=sum(weight.numel() for weight in weights.values()),
        tokens=tuple(tokens),
        nats_per_byte=tuple(losses),
        step_s=statistics.median(spent),
        steps=plan.job.steps,
        settings={
            "kind": optimizer.kind, "lr": optimizer.lr, "adamw_lr": optimizer.adamw_lr, "betas": optimizer.betas,
            "momentum": optimizer.momentum, "weight_decay": optimizer.weight_decay, "schedule": optimizer.schedule,
            "warmup_steps": optimizer.warmup_steps, "batch_tokens": plan.job.batch_tokens,
            "orthogonalized_in": plan.arithmetic.orthogonalization_precision,
        },
        measured=_measured(),
    )  # fmt: skip


def print_costs(names: Sequence[str], minutes: str, corpus: Corpus, rounds: int = 12) -> None:
    """Steps of these choices in turns, so that all of them meet the same neighbours: each one's processor seconds over
    the first one's, the median of the rounds with the least and the greatest."""
    some = [
        assemble(*planned(CHOICES[name], LENGTHS[minutes], 1, 1.0, corpus), sums=ONE_PROCESS, stages=())
        for name in names
    ]
    states, spent = [TrainState()] * len(some), [list[float]() for _ in some]
    for _ in range(rounds + 1):
        for number, assembly in enumerate(some):
            began = time.thread_time()
            for _ in range(4):
                states[number], _ = assembly.step(states[number])
            spent[number].append((time.thread_time() - began) / 4)
    for name, own in zip(names, spent, strict=True):
        ratios = [one / usual for one, usual in zip(own[1:], spent[0][1:], strict=True)]  # the first round warms up
        print(f"{name:32} {statistics.median(ratios):.3f} ({min(ratios):.3f} … {max(ratios):.3f})")
    for assembly in some:
        assembly.loader.close()


def planned(choice: Choice, length: Length, seed: int, share: float, corpus: Corpus) -> tuple[RunConfig, Plan]:
    """The recipe with a choice, and its plan for one thread."""
    batch = round(length.batch_tokens * choice.batch)
    steps = max(1, round(length.steps * share / choice.batch))
    settings = (
        f"model.size={length.size}", "run.workers=1", "run.threads=1", f"run.seed={seed}", "train.precision=float32",
        f"train.batch_tokens={batch}", f"train.budget={steps} steps", "train.matmul_backend=onednn",
    )  # fmt: skip
    rates = [] if choice.lr is None else [f"optimizer.lr={choice.lr * length.lr}"]
    if choice.adamw_lr is not None:
        rates.append(f"optimizer.adamw_lr={choice.adamw_lr * length.lr}")
    config = load_recipe(RECIPE, (*settings, *choice.settings, *rates))
    return config, _plan(config, corpus)


def _plan(config: RunConfig, corpus: Corpus) -> Plan:
    facts, resources = corpus_facts(corpus), Resources(machine=MACHINE, peak_flops=1e11)
    outline = draft(config, facts, resources, recipe_hash="")
    plan = settle(config, outline, outline.layouts)
    return replace(plan, placement=replace(plan.placement, threads=1))


def _corpus(folder: Path) -> Corpus:
    return open_corpus(prepare_corpus(data_request(load_recipe(RECIPE, ())), folder / "cache", lambda *_: None))


def _heldout_loss(assembly: Assembly) -> float:
    """Nats a byte of the whole held-out text."""
    total, _ = assembly.evaluate().tolist()
    return round(total / assembly.corpus.heldout_bytes, 5)


def _measured() -> Mapping[str, object]:
    about = describe()
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"date": now, "commit": about["commit"], "processor": about["processor"]}


def read_rows(path: Path = RESULTS) -> list[Row]:
    """All rows so far."""
    if not path.exists():
        return []
    return [
        Row(**{**row, "tokens": tuple(row["tokens"]), "nats_per_byte": tuple(row["nats_per_byte"])})
        for row in json.loads(path.read_text())["rows"]
    ]


def add_row(row: Row, path: Path = RESULTS) -> None:
    """Write the file with one row more."""
    rows = [
        json.dumps({name: getattr(one, name) for name in Row.__dataclass_fields__}) for one in (*read_rows(path), row)
    ]
    path.write_text('{"name": "time-to-loss", "rows": [\n' + ",\n".join(rows) + "\n]}\n")


def report(rows: Sequence[Row]) -> str:
    """A Markdown table: each choice beside AdamW as derived, over the seeds that both have."""
    heads = [
        "minutes",
        "choice",
        "share of the tokens",
        "seeds",
        "nats a byte",
        "less than AdamW",
        "a step over AdamW's",
    ]
    lines = [heads, ["---"] * len(heads), *_table(rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _table(rows: Sequence[Row]) -> Iterator[list[str]]:
    groups: dict[tuple[str, str, float], dict[int, Row]] = {}
    for row in rows:
        groups.setdefault((row.minutes, row.choice, row.share), {})[row.seed] = row
    for (minutes, name, share), some in sorted(groups.items(), key=lambda one: (one[0][0], _mean(one[1].values()))):
        usual = groups.get((minutes, "adamw", 1.0), {})
        both = sorted(set(some) & set(usual))
        less = [usual[seed].nats_per_byte[-1] - some[seed].nats_per_byte[-1] for seed in both]
        cost = [some[seed].step_s / usual[seed].step_s for seed in both]
        spread = f" ({min(less):.4f} … {max(less):.4f})" if len(less) > 1 else ""
        beside = [f"{statistics.mean(less):.4f}{spread}", f"{statistics.mean(cost):.2f}"] if both else ["", ""]
        yield [minutes, name, f"{share:g}", ", ".join(map(str, sorted(some))), f"{_mean(some.values()):.4f}", *beside]


def _mean(rows: Sequence[Row] | object) -> float:
    return statistics.mean(row.nats_per_byte[-1] for row in rows)  # type: ignore[attr-defined]


def line(row: Row) -> str:
    """A row in a line."""
    return (
        f"{row.choice:32} {row.minutes} min × {row.share:g}, seed {row.seed}: {row.nats_per_byte[-1]:.4f} nats a byte "
        f"after {row.tokens[-1]:,} tokens, {row.step_s * 1e3:.1f} ms a step"
    )


if __name__ == "__main__":
    main()
