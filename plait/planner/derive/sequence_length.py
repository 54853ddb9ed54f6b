"""Derives the length of a training window: from the model's size, and from how long the text or its examples are."""

from __future__ import annotations

from math import ceil

from plait.data.samples.sizes import CorpusSizes, Overlong
from plait.errors import PlaitError
from plait.planner.derive import scaling_rules
from plait.planner.derive.derived import Derived
from plait.recipe.schema import RunConfig
from plait.units import counted, format_count

_MULTIPLE = 64
"""Windows that are as long as the longest example are rounded up to it."""
WINDOWS_PER_STEP = 8
"""Where a step of the usual size fills fewer windows, they are made shorter: up to eight workers can share it then, and
it comes nearer to that size. What is learnt is the same, as the examples in a window do not see each other."""
FULL_SHARE = 0.95
"""Windows are not made so short that packing fills less of them, if there is a choice."""


def stream_sequence(
    config: RunConfig, parameters: int, *, train_tokens: int, longest: int, longest_of_model: int | None
) -> Derived[int]:
    """For a stream of text: the usual length, or all that the text (`longest`) or the model allows. Raises PlaitError
    for a longer one."""
    requested = config.train.sequence
    if requested != "auto":
        if requested > longest:
            raise PlaitError(
                f"train.sequence = {requested} is longer than the data allow ({format_count(train_tokens)} "
                f"training tokens); choose at most {longest}"
            )
        return Derived(value=requested)
    usual = scaling_rules.usual_sequence_length(parameters)
    if longest_of_model is not None and longest_of_model < min(usual, longest):
        reason = f"sequence {longest_of_model}: the longest that the model was made for"
        return Derived(value=longest_of_model, reasons=(reason,))
    sequence = usual if usual <= longest else max(2, longest // 16 * 16 or longest)
    reason = f"sequence {sequence}: {'usual for this size' if sequence == usual else 'all that the data allow'}"
    return Derived(value=sequence, reasons=(reason,))


def example_sequence(
    config: RunConfig,
    parameters: int,
    sizes: CorpusSizes,
    *,
    longest_of_model: int | None,
    step_tokens: float | None,
) -> Derived[int]:
    """For whole examples: the usual length, longer where the longest example needs it, shorter where a step of
    `step_tokens` (None: not known yet) would have few windows. Raises PlaitError for examples that do not fit, unless
    the recipe says what becomes of them."""
    requested, overlong, why = config.train.sequence, config.data.overlong, list[str]()
    usual = scaling_rules.usual_sequence_length(parameters)
    needed = usual if overlong != "refuse" else max(usual, _rounded_up(sizes.longest_example))
    sequence = longest = min(needed, longest_of_model or needed) if requested == "auto" else requested
    sizes.check_overlong(longest, overlong)
    if requested == "auto":
        reason = "usual for this size" if longest == usual else f"the longest {sizes.unit} fits into it"
        reason = reason if longest == needed else "the longest that the model was made for"
        if step_tokens is not None and (shorter := _shorter_window(sizes, longest, step_tokens, overlong)) < longest:
            sequence, number = shorter, round(step_tokens / shorter)
            reason = f"{sizes.unit}s are short, and a step has {counted(number, 'such window')}"
        why.append(f"sequence {sequence}: {reason}")
    packed = sizes.packed(sequence, overlong)
    why.append(
        f"windows {packed.share:.1%} full: whole {sizes.unit}s, packed by best fit into {packed.windows:,} of them"
    )
    if packed.overlong:
        what = "left out" if overlong == "drop" else "cut at a window's end"
        why.append(f"{counted(packed.overlong, sizes.unit)} of more than {sequence} tokens {what} (data.overlong)")
    return Derived(value=sequence, reasons=tuple(why))


def _shorter_window(sizes: CorpusSizes, longest: int, step_tokens: float, overlong: Overlong) -> int:
    """The shortest window that is as full as windows should be and loses nothing, where a step has few of the longest;
    else the longest."""
    if overlong == "cut" and sizes.longest_example > longest:  # a shorter window would cut more
        return longest
    shortest = max(_rounded_up(sizes.longest_within(longest)), _rounded_up(step_tokens / WINDOWS_PER_STEP))
    choices = []
    while shortest < longest:
        choices.append(shortest)
        shortest *= 2
    shares: dict[int, float] = {}
    for sequence in (*choices, longest):
        shares[sequence] = sizes.packed(sequence, overlong).share if choices else 1.0
        if shares[sequence] >= FULL_SHARE:
            return sequence
    return max(shares, key=lambda sequence: shares[sequence])


def _rounded_up(tokens: float) -> int:
    return max(1, ceil(tokens / _MULTIPLE)) * _MULTIPLE
