"""Derives the length of a training window: from the model's size, and from how long the text or its examples are."""

from __future__ import annotations

from math import ceil

from plait.data.samples.sizes import CorpusSizes
from plait.errors import PlaitError
from plait.planner.derive import scaling_rules
from plait.recipe.schema import RunConfig
from plait.units import counted, format_count

_MULTIPLE = 64
"""Windows that are as long as the longest example are rounded up to it."""


def stream_sequence(
    config: RunConfig, parameters: int, tokens: tuple[int, int], why: list[str], longest_of_model: int | None
) -> int:
    """For a stream of text: the usual length, or all that the text or the model allows. `tokens` are those of training,
    and those of the longest window. Raises PlaitError for a longer one."""
    requested, (train_tokens, longest) = config.train.sequence, tokens
    if requested != "auto":
        if requested > longest:
            raise PlaitError(
                f"train.sequence = {requested} is longer than the data allow ({format_count(train_tokens)} "
                f"training tokens); choose at most {longest}"
            )
        return requested
    usual = scaling_rules.usual_sequence_length(parameters)
    if longest_of_model is not None and longest_of_model < min(usual, longest):
        why.append(f"sequence {longest_of_model}: the longest that the model was made for")
        return longest_of_model
    sequence = usual if usual <= longest else max(2, longest // 16 * 16 or longest)
    why.append(f"sequence {sequence}: " + ("usual for this size" if sequence == usual else "all that the data allow"))
    return sequence


def example_sequence(
    config: RunConfig, parameters: int, sizes: CorpusSizes, why: list[str], longest_of_model: int | None
) -> int:
    """For whole examples: the usual length, or longer where the longest example needs it. Raises PlaitError for
    examples that do not fit, unless the recipe says what becomes of them."""
    requested, overlong = config.train.sequence, config.data.overlong
    usual = scaling_rules.usual_sequence_length(parameters)
    needed = usual if overlong != "refuse" else max(usual, ceil(sizes.longest_example / _MULTIPLE) * _MULTIPLE)
    sequence = min(needed, longest_of_model or needed) if requested == "auto" else requested
    sizes.check_overlong(sequence, overlong)
    if requested == "auto":
        reason = "usual for this size" if sequence == usual else "the longest example fits into it"
        why.append(
            f"sequence {sequence}: {reason if sequence == needed else 'the longest that the model was made for'}"
        )
    packed = sizes.packed(sequence, overlong)
    why.append(f"windows {packed.share:.1%} full: whole examples, packed by best fit into {packed.windows:,} of them")
    if packed.overlong:
        what = "left out" if overlong == "drop" else "cut at a window's end"
        why.append(f"{counted(packed.overlong, 'example')} of more than {sequence} tokens {what} (data.overlong)")
    return sequence
