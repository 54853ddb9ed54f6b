"""What a single value of a recipe may be: amounts, sizes, names and numbers, each with its check."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from plait.errors import PlaitError
from plait.layout import LARGEST_CLUSTER
from plait.model.shape import LONGEST_SEQUENCE, MOST_LAYERS, MOST_OF_A_SIZE
from plait.units import parse_amount, parse_count, parse_every

Auto = Literal["auto"]
LONGEST_NAME = 63
_USUAL_SIZES = ("1M", "5M", "25M", "125M", "350M", "1B", "7B")
"""Parameters of models that people train, from a minute on a laptop to months on a cluster."""
LARGEST_COUNT = 10**12
"""Above every batch, budget and degree of a run that anybody has published, and far below what an integer overflows."""


def _valid(parse: Callable[[str], object]) -> AfterValidator:
    """A validator that calls `parse` on the text and keeps the text as the person wrote it."""

    def check(text: str) -> str:
        if text != "auto":
            try:
                parse(text)
            except PlaitError as error:
                raise ValueError(str(error)) from None  # so that pydantic adds which key it was
        return text

    return AfterValidator(check)


def _number_of(value: object) -> object:
    """The number that "512K" or "16M" stands for; whatever is no text stays as it is."""
    if not isinstance(value, str):
        return value
    try:
        return parse_count(value)
    except PlaitError as error:
        raise ValueError(str(error)) from None


def _device_numbers(value: object) -> object:
    """The GPU numbers in "0,2", [0, 2] or 0."""
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    if not isinstance(value, str):
        return value
    numbers = [part.strip() for part in value.split(",")]
    if not all(number.isdecimal() for number in numbers):
        raise ValueError(f'"{value}" names no devices; write "auto", "cpu", "tpu", or GPUs by number such as "0,2"')
    return tuple(map(int, numbers))


def _check_devices(numbers: tuple[int, ...]) -> tuple[int, ...]:
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError('each GPU should be named once, and at least one; write "auto" for all')
    return numbers


def _check_size(text: str) -> None:
    try:
        parameters = parse_count(text)
    except PlaitError as error:
        if any(char.isdigit() for char in text):
            raise
        usual = ", ".join(f'"{size}"' for size in _USUAL_SIZES)
        raise PlaitError(f'"{text}" is not a size; write a number of parameters, for example {usual}') from error
    if parameters < 1:
        raise PlaitError(f'a model of {text} parameters learns nothing; write for example "5M" or "2.6B"')


def _check_name(text: str) -> None:
    if not re.fullmatch(rf"[a-z0-9][a-z0-9._-]{{0,{LONGEST_NAME - 1}}}", text):
        raise PlaitError(
            f'"{text}" is not a name; write small letters, digits, ".", "_" and "-", at most {LONGEST_NAME}'
        )


def _check_steps(text: str) -> None:
    every = parse_every(text)
    if every.unit != "steps":
        raise PlaitError(f'"{text}" must count steps; write for example "100 steps", 5 for five times, or "never"')


def _check_time(text: str) -> None:
    every = parse_every(text)
    if every.value and every.unit != "seconds":
        raise PlaitError(f'"{text}" is not a time; write for example "6 hours", "30 minutes" or "never"')


AmountText = Annotated[str, _valid(parse_amount)]
EveryText = Annotated[str, _valid(parse_every)]
StepsText = Annotated[str, _valid(_check_steps)]
TimeText = Annotated[str, _valid(_check_time)]
SizeText = Annotated[str, _valid(_check_size)]
Name = Annotated[str, _valid(_check_name)]
Positive = Annotated[int, Field(gt=0, le=LARGEST_COUNT)]
TokenCount = Annotated[Positive, BeforeValidator(_number_of)]
Layers = Annotated[int, Field(gt=0, le=MOST_LAYERS)]
Width = Annotated[int, Field(gt=0, le=MOST_OF_A_SIZE)]
"""Of a model, its heads, its inner parts and its vocabulary."""
CountFromZero = Annotated[int, Field(ge=0, le=MOST_OF_A_SIZE)]
SequenceLength = Annotated[int, Field(ge=2, le=LONGEST_SEQUENCE)]
Degree = Annotated[int, Field(gt=0, le=LARGEST_CLUSTER)]
DeviceNumbers = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=LARGEST_CLUSTER)], ...],
    BeforeValidator(_device_numbers),
    AfterValidator(_check_devices),
]
Steps = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
Factor = Annotated[float, Field(gt=0, allow_inf_nan=False)]
LossWeight = Annotated[float, Field(ge=0, lt=1e6)]
BalanceChoice = Literal["none", "bias", "sequence", "global", "switch"]
"""What keeps a mixture's experts equally busy."""
Fraction = Annotated[float, Field(ge=0, le=0.5)]
