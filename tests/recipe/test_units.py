"""Amounts as people write them."""

from __future__ import annotations

import pytest

from plait.errors import PlaitError
from plait.units import Amount, format_bytes, format_si, parse_amount, parse_every


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("412ms", 0.412), ("5 milliseconds", 0.005), ("3s", 3), ("90 seconds", 90), ("2 mins", 120), ("1 hours", 3600)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_amount(text) == Amount(pytest.approx(seconds), "seconds")  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "12", "s", "3K seconds", "0 steps", "-1 steps", "1e3 tokens"])
def test_what_is_no_amount_is_told(text: str) -> None:
    with pytest.raises(PlaitError, match="is not an amount; write for example"):
        parse_amount(text)


def test_an_interval_counts_steps_or_seconds() -> None:
    assert parse_every("never").value == 0 and parse_every("2 min").value == 120
    with pytest.raises(PlaitError, match='is not an interval; write for example "10 steps"'):
        parse_every("5K tokens")


def test_bytes_have_three_digits_and_no_powers_of_ten() -> None:
    told = [format_bytes(value) for value in (999, 1023, 1010 * 2**20, 2**30, 1.5 * 2**40)]
    assert told == ["999 B", "0.999 KiB", "0.986 GiB", "1 GiB", "1.5 TiB"]
    assert not any("e+" in format_bytes(1.01**n) for n in range(3000))


def test_prefixes_are_those_of_the_unit() -> None:
    told = [format_si(value, "bit/s") for value in (958e6, 2.92e9, 999.8e6, 4e13, 1500, 12)]
    assert told == ["958 Mbit/s", "2.92 Gbit/s", "1 Gbit/s", "40 Tbit/s", "1.5 kbit/s", "12 bit/s"]
    assert not any("e+" in format_si(1.01**n, "FLOP/s") for n in range(4100))
