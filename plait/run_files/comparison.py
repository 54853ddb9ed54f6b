"""A comparison of two runs as values and as printed lines: the output of `plait compare`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any, Literal

from plait.checked_json import printable
from plait.report.receipt import ITEM_NAMES
from plait.run_files.summary import LossUnit, RunState
from plait.units import counted, format_count, format_duration, times_text

TextRelation = Literal["same tokens", "same text", "other text", "unknown"]
"""Whether two runs learned from the same prepared tokens, from the same text with different tokenizers, or from
different texts; unknown if prepared data are gone."""
Effect = Literal["loss", "speed", "loss and speed", "neither"]
"""The results that a difference between two plans can change."""
_EFFECTS: Sequence[tuple[str, Effect]] = (
    ("job.shape.", "loss and speed"),
    ("job.sequence", "loss and speed"),
    ("job.batch_sequences", "loss and speed"),
    ("job.documents", "loss and speed"),
    ("job.", "loss"),
    ("arithmetic.precision", "loss and speed"),
    ("arithmetic.matmul_precision", "loss and speed"),
    ("arithmetic.gradient_transfer", "loss and speed"),
    ("arithmetic.stage_transfer", "loss and speed"),
    ("arithmetic.", "speed"),
    ("placement.", "speed"),
    ("machines.", "speed"),
)
SHOWN_AT_MOST = 12
"""Most differences listed per kind; --json has all."""
_ALIKE_SPEED = 1.02
_LONGEST_VALUE = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDifference:
    """A key of a recipe or a plan, or the name of a package, with its value in each run; None: not given."""

    key: str
    first: Any
    second: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedNoise:
    """The noise between runs that differ only by seed, for a difference between two recipes."""

    runs: tuple[int, int]
    """Number of runs like the first and like the second one, including themselves."""
    means: tuple[float, float]
    deviation: float
    """Standard deviation between seeds, pooled over both."""
    margin: float
    """Half the 95 % interval of the difference of the means."""

    @property
    def is_beyond(self) -> bool:
        """Whether the means differ by more than seeds explain."""
        return abs(self.means[0] - self.means[1]) > self.margin


@dataclass(frozen=True, slots=True, kw_only=True)
class LossComparison:
    """Losses of two runs on the same text; lower is better."""

    unit: LossUnit
    text: Literal["held out", "training"]
    """"training" is the mean over the last tenth of the tokens that both have seen."""
    losses: tuple[float, float]
    tokens: tuple[int, int]
    """Training tokens when these were measured."""
    seeds: SeedNoise | None
    """None if no other run differs from one of the two only by seed."""
    differ_by_seed_alone: bool
    heldout_tokens: int | None
    text_error: float | None
    """Rough standard error of one such loss on other text of the same kind, if the losses of tokens vary as much as
    their mean; that of a difference on the same text is smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedComparison:
    """Typical steps of two runs."""

    tokens_per_s: tuple[float, float]
    step_s: tuple[float, float]
    spread: tuple[float, float]
    """Interquartile range of each run's steps over their median."""
    forecast_step_s: tuple[float | None, float | None]
    items: tuple[Mapping[str, float], Mapping[str, float]] | None
    """Measured seconds of a step by item; None unless both runs have them, for batches of the same size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """Two compared runs. `print` shows the output of `plait compare`."""

    names: tuple[str, str]
    states: tuple[RunState, RunState]
    seeds: tuple[int, int]
    recipe: tuple[RunDifference, ...]
    plan: tuple[RunDifference, ...]
    versions: tuple[RunDifference, ...]
    text: TextRelation
    loss: LossComparison | None
    why_no_loss: str
    """A sentence if losses cannot be compared, else empty."""
    speed: SpeedComparison | None
    settings: tuple[str, ...]
    """Settings with which the first run's recipe repeats that run, except for the seed."""

    @property
    def better(self) -> str | None:
        """The run with the lower loss; None if the difference is within the noise of seeds, or unknown."""
        if self.loss is None or self.loss.differ_by_seed_alone or (self.loss.seeds and not self.loss.seeds.is_beyond):
            return None
        values = self.loss.seeds.means if self.loss.seeds else self.loss.losses
        return None if values[0] == values[1] else self.names[values[1] < values[0]]

    def explaining(self, effect: Literal["loss", "speed"]) -> list[RunDifference]:
        """The differences of the plans that can change the loss, or the speed."""
        return [one for one in self.plan if effect in effect_of(one.key)]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        loss = self.loss and asdict(self.loss)
        if loss and self.loss and self.loss.seeds:
            loss["seeds"] |= {"is_beyond": self.loss.seeds.is_beyond}
        explained = {
            "loss_explained_by": [one.key for one in self.explaining("loss")],
            "speed_explained_by": [one.key for one in self.explaining("speed")],
        }
        return asdict(self) | {"loss": loss, "better": self.better} | explained

    def __str__(self) -> str:
        return "\n".join(comparison_lines(self))

    def _repr_html_(self) -> str:
        """The comparison as a notebook shows it."""
        return f"<pre>{escape(printable(str(self)))}</pre>"


def effect_of(key: str) -> Effect:
    """The results that a difference in a plan's key can change."""
    for begin, effect in _EFFECTS:
        if key.startswith(begin):
            return effect
    return "neither"


def comparison_lines(found: RunComparison) -> Iterator[str]:
    """What differs, which learned better, which is faster, and what explains it."""
    first, second = found.names
    yield f"compare  {first} ({found.states[0]}), {second} ({found.states[1]})"
    yield from _loss_lines(found)
    yield from _speed_lines(found)
    yield from _difference_lines("recipe", "as asked", found.recipe)
    yield from _difference_lines("plan", "as carried out", found.plan)
    yield from _difference_lines("versions", "of packages", found.versions)
    yield f"data     {_TEXTS[found.text]}"


_TEXTS = {
    "same tokens": "the same text and tokens",
    "same text": "the same text, tokenized differently: losses are compared per byte",
    "other text": "different texts",
    "unknown": "different tokens; whether the text is the same is unknown, because prepared data are gone",
}


def _loss_lines(found: RunComparison) -> Iterator[str]:
    loss = found.loss
    if loss is None:
        yield f"loss     {found.why_no_loss}"
        return
    measured = "held out" if loss.text == "held out" else "over the last tenth of the tokens that both have seen"
    figures = " and ".join(f"{value:.4f}" for value in loss.losses)
    tokens = [format_count(count) for count in loss.tokens]
    after = f"after {tokens[0]} tokens" if tokens[0] == tokens[1] else f"after {tokens[0]} and {tokens[1]} tokens"
    yield f"loss     {figures} {loss.unit} {measured}, {after}"
    yield f"         {_verdict(found, loss)}"
    yield f"noise    {_seeds_text(found, loss)}"
    if loss.heldout_tokens and loss.text_error is not None:
        yield (
            f"         of the held-out text ({format_count(loss.heldout_tokens)} tokens): on similar text, a single "
            f"loss could be about {loss.text_error:.2g} higher or lower, and the difference between two runs by less"
        )
    if not _is_within_noise(found) and (explained := _explained_loss(found)):
        yield f"         {explained}"


def _verdict(found: RunComparison, loss: LossComparison) -> str:
    averaged = loss.seeds is not None and not loss.differ_by_seed_alone
    values = loss.seeds.means if loss.seeds and averaged else loss.losses
    low, high = min(values), max(values)
    if _is_within_noise(found) or low == high:
        return "no difference beyond the noise of seeds" if averaged else "no difference"
    over = "on average over seeds " if averaged else ""
    return f"{over}{found.names[values[1] < values[0]]} is lower by {high - low:.2g} ({(high - low) / high:.1%})"


def _is_within_noise(found: RunComparison) -> bool:
    loss = found.loss
    return loss is not None and not loss.differ_by_seed_alone and loss.seeds is not None and not loss.seeds.is_beyond


def _seeds_text(found: RunComparison, loss: LossComparison) -> str:
    seeds = loss.seeds
    if loss.differ_by_seed_alone:
        known = (
            f"; {counted(seeds.runs[0], 'seed')} differ by {seeds.deviation:.4f} (standard deviation)" if seeds else ""
        )
        return f"the two differ only by seed: this difference is the noise of seeds{known}"
    if seeds is None:
        if loss.text == "training" or found.states != ("finished", "finished"):
            return (
                "of seeds: unknown, since it needs finished runs with a held-out loss; do not trust a small difference"
            )
        name, seed = found.names[0], max(found.seeds) + 1
        words = (f"runs/{name}/recipe.toml", f"run.name={name}-seed{seed}", f"run.seed={seed}", *found.settings)
        return (
            "of seeds: unknown, since no run here differs from one of these only by seed; to measure it, train one: "
            f"{shlex.join(['plait', 'train', *words])}"
        )
    runs = f"{counted(seeds.runs[0], 'seed')} of {found.names[0]}, {seeds.runs[1]} of {found.names[1]}"
    verdict = "beyond" if seeds.is_beyond else "within"
    difference = abs(seeds.means[0] - seeds.means[1])
    few = "; more seeds would narrow that" if sum(seeds.runs) <= 4 else ""
    return (
        f"of seeds ({runs}): {seeds.deviation:.2g} (standard deviation); the difference of {difference:.2g} is "
        f"{verdict} their noise, up to {seeds.margin:.2g} (95%){few}"
    )


def _explained_loss(found: RunComparison) -> str:
    causes = found.explaining("loss")
    asked = [one for one in found.recipe if _asks_for_learning(one.key)]
    seeds = "; their seeds differ, too" if found.seeds[0] != found.seeds[1] else ""
    if not causes and not asked and found.text == "same tokens":
        return (
            ""
            if seeds
            else "nothing that changes the result of training differs: only rounding, from layout or kernels, remains"
        )
    if len(asked) == 1:
        own = asked[0].key.rpartition(".")[2]
        follows = [one for one in causes if not one.key.startswith("job.budget") and not one.key.endswith(own)]
        derived = f" (which determines {_listed(follows)})" if follows else ""
        only = f"{asked[0].key}, the only differing setting that changes the result of training"
        return f"explained by {only}{derived}{seeds}"
    named = asked or causes
    if len(named) == 1:
        return f"explained by {_listed(named)}{seeds}"
    return f"may come from {_listed(named)}: two runs cannot tell which; train one that changes only one of them{seeds}"


def _asks_for_learning(key: str) -> bool:
    """Whether a key of a recipe, other than the seed, changes the result of training."""
    return key in ("train.budget", "train.sequence", "train.batch_tokens", "train.precision") or (
        key.startswith(("model.", "data.", "optimizer.", "finetune.")) and key != "data.files"
    )


def _listed(differences: Sequence[RunDifference]) -> str:
    names = [one.key for one in differences]
    more = len(names) - SHOWN_AT_MOST
    return ", ".join(names[:SHOWN_AT_MOST]) + (f" and {more} more" if more > 0 else "")


def _speed_lines(found: RunComparison) -> Iterator[str]:
    speed = found.speed
    if speed is None:
        yield "speed    not known for both: one has no step yet"
        return
    ratio = speed.tokens_per_s[1] / speed.tokens_per_s[0]
    fast, times = (found.names[1], ratio) if ratio > 1 else (found.names[0], 1 / ratio)
    rates = " and ".join(map(format_count, speed.tokens_per_s))
    steps = " and ".join(map(format_duration, speed.step_s))
    faster = f"{times_text(times)} as fast" if times >= 2 else f"{times - 1:.0%} faster"
    verdict = "about equally fast" if times < _ALIKE_SPEED else f"{fast} is {faster}"
    yield f"speed    {rates} tokens/s, {steps} a step: {verdict}"
    if (spread := max(speed.spread)) > times - 1 and times >= _ALIKE_SPEED:
        yield f"         the steps of one run differ by {spread:.0%}, more than that: other programs may be the cause"
    yield f"         {_explained_speed(found, speed)}"
    if speed.items is not None:
        yield f"         {_items_text(speed)}"


def _explained_speed(found: RunComparison, speed: SpeedComparison) -> str:
    causes = [one for one in found.plan if "speed" in effect_of(one.key)]
    if not causes:
        versions = f" except the versions of {_listed(found.versions)}" if found.versions else ""
        return f"nothing that affects speed differs{versions}: other programs or the machine's noise may be the cause"
    text = f"explained by {_listed(causes)}" if len(causes) == 1 else f"may come from {_listed(causes)}"
    first, second = speed.forecast_step_s
    if first is None or second is None:
        return text
    planned, measured = second / first, speed.step_s[1] / speed.step_s[0]
    return f"{text}; a step was forecast at {planned:.2f} times the first run's time, and took {measured:.2f} times it"


def _items_text(speed: SpeedComparison) -> str:
    assert speed.items is not None
    first, second = speed.items
    changed = sorted(ITEM_NAMES, key=lambda name: -abs(second[name] - first[name]))[:2]
    named = (
        f"{ITEM_NAMES[name]} {format_duration(first[name])} and {format_duration(second[name])}" for name in changed
    )
    return f"of a step: {', '.join(named)}"


def _difference_lines(title: str, what: str, differences: Sequence[RunDifference]) -> Iterator[str]:
    if not differences:
        yield f"{title:8} no difference {what}"
    for number, one in enumerate(differences[:SHOWN_AT_MOST]):
        yield f"{title if number == 0 else '':8} {one.key}: {_value_text(one.first)} → {_value_text(one.second)}"
    if len(differences) > SHOWN_AT_MOST:
        yield f"{'':8} and {len(differences) - SHOWN_AT_MOST} more, which --json has"


def _value_text(value: Any) -> str:
    text = "not given" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"
