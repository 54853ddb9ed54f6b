"""Checks of a shape's numbers that belong together; each raises PlaitError."""

from __future__ import annotations

from collections.abc import Sequence, Set

from plait.errors import PlaitError


def check_shape_value(name: str, value: object, choices: Sequence[str]) -> None:
    """Refuse a value that is none of the choices."""
    if value not in choices:
        raise PlaitError(f"the model's {name} is {value!r}; choose " + " or ".join(f'"{choice}"' for choice in choices))


def check_count(name: str, value: object, most: int) -> None:
    """Refuse what is no whole number from 1 to `most`."""
    if type(value) is not int or not 1 <= value <= most:
        raise PlaitError(f"the model's {name} is {value!r}; choose a whole number from 1 to {most:,}")


def check_fields(given: Set[str], known: Set[str], needed: Set[str]) -> None:
    """Refuse a shape with a field that no shape has, and one that lacks a field which each has."""
    if unknown := sorted(given - known):
        raise PlaitError(f"a model's shape has no field {unknown[0]!r}; take it out, the fields are {sorted(known)}")
    if missing := sorted(needed - given):
        raise PlaitError(f"the model's shape lacks {missing[0]!r}; add it")


def check_head_counts(heads: int, kv_heads: int, rotary_width: int) -> None:
    """Refuse heads that cannot share keys, and heads that rotary positions, in `rotary_width` of their numbers, cannot
    turn."""
    if heads % kv_heads:
        fitting = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        raise PlaitError(f"kv_heads = {kv_heads} does not divide {heads} heads; choose one of {fitting}")
    if rotary_width % 2:
        raise PlaitError(f"rotary positions turn pairs, and head_width is {rotary_width}; choose an even head_width")


def check_position_numbers(windows: Sequence[int], layers: int, sequence: int, learned_positions: int) -> None:
    """Refuse windows that are not one for each layer, and sequences longer than a learned position table."""
    if windows and (len(windows) != layers or min(windows) < 0):
        raise PlaitError(
            f"the model's windows are {windows}; give one number of at least 0 for each of {layers} layers"
        )
    if learned_positions and not sequence <= learned_positions:
        raise PlaitError(
            f"a sequence of {sequence} tokens is longer than the model's table of {learned_positions} "
            f"positions; choose at most {learned_positions}"
        )


def check_rotary_width(rotary_width: int, head_width: int) -> None:
    """Refuse rotary positions in an odd number of a head's numbers, or in more than it has."""
    if type(rotary_width) is not int or rotary_width % 2 or not 0 <= rotary_width <= head_width:
        raise PlaitError(
            f"rotary positions turn pairs of a head's {head_width} numbers, and rotary_width is {rotary_width}; choose "
            f"an even one of at most {head_width}"
        )


def check_layer_numbers(name: str, numbers: Sequence[int], layers: int) -> None:
    """Refuse a list that does not name layers in order, each once."""
    if list(numbers) != sorted(set(numbers)) or any(type(one) is not int or not 0 <= one < layers for one in numbers):
        raise PlaitError(
            f"the model's {name} are {tuple(numbers)}; name layers from 0 to {layers - 1} in order, each once"
        )


def biased_parts(bias: str) -> frozenset[str]:
    """The linear layers that have a bias: "qkv", attention's "output", "feedforward"."""
    attention, feedforward = bias in ("attention", "all"), bias in ("feedforward", "all")
    return frozenset(
        (["qkv"] if attention or bias == "qkv" else [])
        + (["output"] if attention else [])
        + (["feedforward"] if feedforward else [])
    )
