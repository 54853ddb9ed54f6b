"""A comparison of two runs in lines for people: what `plait compare` prints."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from plait.report.receipt import ITEM_NAMES
from plait.run_files.comparison import (
    LossComparison,
    RunComparison,
    RunDifference,
    SpeedComparison,
    effect_of,
)
from plait.units import counted, format_count, format_duration, times_text

SHOWN_AT_MOST = 12
"""Differences of one kind that are listed; --json has all."""
_ALIKE_SPEED = 1.02
_LONGEST_VALUE = 60


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
    "same text": "the same text, divided into tokens by different tokenizers: losses are compared per byte",
    "other text": "different texts",
    "unknown": "other tokens; the prepared data that would tell whether their text is the same are gone",
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
            f"         of the held-out text ({format_count(loss.heldout_tokens)} tokens): on other text of its kind a "
            f"loss could be about {loss.text_error:.2g} higher or lower, the difference of two runs by less"
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
        return f"the two differ by their seed alone: this difference is the noise of seeds{known}"
    if seeds is None:
        if loss.text == "training" or found.states != ("finished", "finished"):
            return (
                "of seeds: not known, as it takes finished runs with a held-out loss; do not trust a small difference"
            )
        name, seed = shlex.quote(found.names[0]), max(found.seeds) + 1
        return (
            "of seeds: not known, no run here differs from one of these by its seed alone; to know it, train one: "
            f"plait train runs/{name}/recipe.toml run.name={name}-seed{seed} run.seed={seed}"
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
        return "" if seeds else "nothing that is learned from differs: what remains is rounding, by layout or kernels"
    if len(asked) == 1:
        own = asked[0].key.rpartition(".")[2]
        follows = [one for one in causes if not one.key.startswith("job.budget") and not one.key.endswith(own)]
        derived = f" (from it follow: {_listed(follows)})" if follows else ""
        return f"explained by {asked[0].key}, as nothing else that was asked changes what is learned{derived}{seeds}"
    named = asked or causes
    if len(named) == 1:
        return f"explained by {_listed(named)}{seeds}"
    return (
        f"may come from {_listed(named)}: two runs cannot tell which; train one that changes one of them alone{seeds}"
    )


def _asks_for_learning(key: str) -> bool:
    """Whether a key of a recipe, the seed apart, changes what is learned."""
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
        yield "speed    not known of both: one has no step yet"
        return
    ratio = speed.tokens_per_s[1] / speed.tokens_per_s[0]
    fast, times = (found.names[1], ratio) if ratio > 1 else (found.names[0], 1 / ratio)
    rates = " and ".join(map(format_count, speed.tokens_per_s))
    steps = " and ".join(map(format_duration, speed.step_s))
    faster = f"{times_text(times)} as fast" if times >= 2 else f"{times - 1:.0%} faster"
    verdict = "about equally fast" if times < _ALIKE_SPEED else f"{fast} is {faster}"
    yield f"speed    {rates} tokens/s, {steps} a step: {verdict}"
    if (spread := max(speed.spread)) > times - 1 and times >= _ALIKE_SPEED:
        yield f"         the steps of one run differ by {spread:.0%}, more than that: other programs may be why"
    yield f"         {_explained_speed(found, speed)}"
    if speed.items is not None:
        yield f"         {_items_text(speed)}"


def _explained_speed(found: RunComparison, speed: SpeedComparison) -> str:
    causes = [one for one in found.plan if "speed" in effect_of(one.key)]
    if not causes:
        versions = f" but the versions of {_listed(found.versions)}" if found.versions else ""
        return f"nothing that decides the speed differs{versions}: other programs, or the noise of the machine"
    text = f"explained by {_listed(causes)}" if len(causes) == 1 else f"may come from {_listed(causes)}"
    first, second = speed.forecast_step_s
    if first is None or second is None:
        return text
    planned, measured = second / first, speed.step_s[1] / speed.step_s[0]
    return f"{text}; planned were steps {planned:.2f} times as long as the first's, and they were {measured:.2f} times"


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
