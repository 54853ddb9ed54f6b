"""A measurement as JSON: back the same, and nothing strange comes in."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.errors import PlaitError
from plait.machines.measured import (
    MeasuredOverlap,
    Measurements,
    measurements_as_values,
    measurements_from_json,
    measurements_json,
    measurements_table,
)
from tests.probing.probed import device, link, measured, point, timed

Change = Callable[[dict[str, Any]], Any]


def test_a_measurement_reads_back_as_it_was() -> None:
    whole = measured(
        link("send", point(1024, 1e-4), point(2**20, 2e-3), scope="between"),
        link("swap_parts", point(1024, 1e-4), ranks=4),
        devices=(device(timed("product", (256, 320, 896), 1e-3)), device(host="b", rates=(0.5,))),
    )
    again = measurements_from_json(measurements_json(whole), "here")
    assert again == whole
    assert isinstance(again.devices[0].timed[0].sizes, tuple)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda v: v.update(format=0), "version"),
        (lambda v: v.update(speed=3), "speed"),
        (lambda v: v.pop("links"), "links"),
        (lambda v: v.update(devices=[]), "device"),
        (lambda v: v.update(devices={}), "devices"),
        (lambda v: v.update(workers=True), "workers"),
        (lambda v: v.update(workers=2.5), "workers"),
        (lambda v: v["devices"][0].update(timed=[]), "nothing was measured"),
        (lambda v: v["devices"][0]["timed"][0].update(seconds=0), "seconds"),
        (lambda v: v["devices"][0]["timed"][0].update(seconds="fast"), "seconds"),
        (lambda v: v["devices"][0]["timed"][0].update(seconds=float("nan")), "seconds"),
        (lambda v: v["devices"][0]["timed"][0].update(work="sleep"), "work"),
        (lambda v: v["devices"][0]["timed"][0].update(sizes=[1]), "sizes"),
        (lambda v: v["devices"][0]["timed"][0].update(colour="red"), "colour"),
        (lambda v: v["devices"][0]["beside"].update(product=-1), "side by side"),
        (lambda v: v["links"][0].update(scope="under"), "scope"),
        (lambda v: v["links"][0]["points"].reverse(), "grow"),
        (lambda v: v["links"][0]["points"][0].update(bytes=-1), "bytes"),
        (lambda v: v["overlaps"][0].update(both_s=0), "both_s"),
    ],
)
def test_nonsense_is_refused_in_one_sentence_with_its_mend(change: Change, word: str) -> None:
    values = json.loads(json.dumps(measurements_as_values(measured())))
    change(values)
    with pytest.raises(PlaitError, match=word) as refused:
        measurements_from_json(json.dumps(values), "the file")
    assert "\n" not in str(refused.value)
    assert any(fix in str(refused.value) for fix in ("probe again", "write", "add it"))


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(PlaitError, match="not JSON"):
        measurements_from_json("{", "the file")
    with pytest.raises(PlaitError, match="version"):
        measurements_from_json("[]", "the file")


@pytest.mark.parametrize(("both_s", "share"), [(0.06, 1.0), (0.11, 0.0), (0.085, 0.5), (0.2, 0.0), (0.01, 1.0)])
def test_the_hidden_share_is_that_of_the_shorter_side(both_s: float, share: float) -> None:
    one = MeasuredOverlap(scope="inside", ranks=2, bytes=1, compute_s=0.06, communicate_s=0.05, both_s=both_s)
    assert one.hidden_share == pytest.approx(share)


def test_unsteadiness_is_the_upper_quartile_of_spreads() -> None:
    assert isinstance(measured(), Measurements)
    assert measured().upper_quartile_spread == pytest.approx(0.1) and measured().noise_warning == ""
    noisy = device()
    noisy = replace(noisy, timed=tuple(replace(one, spread=0.3) for one in noisy.timed))
    told = measured(devices=(noisy,)).noise_warning
    assert told == "the figures spread by 30%, though medians count: other programs were running"


GOLDEN = Path(__file__).parents[1] / "golden" / "probe-two-hosts.txt"


def test_the_table_of_two_hosts_reads_as_kept() -> None:
    ada = device(
        *(timed(work, (4096, 320, 896), 16e-3) for work in ("product", "product_input", "product_weight")),
        timed("product", (64, 128, 128), 40e-6),
        timed("attention", (16, 256, 10, 10, 32), 18e-3),
        timed("attention_backward", (16, 256, 10, 10, 32), 36e-3),
        timed("attention", (2, 1024, 2, 2, 64), 6e-3),
        timed("attention_backward", (2, 1024, 2, 2, 64), 14e-3),
        timed("stream", (4096, 320, 896), 20e-3),
        timed("stream_backward", (4096, 320, 896), 30e-3),
        timed("head", (768, 320, 8192), 100e-3),
        timed("update", (2_000_000, 18), 4e-3),
        timed("accumulate", (2**22,), 2.4e-3),
        timed("copy", (2**18,), 12e-6),
        timed("copy", (2**26,), 13e-3),
        timed("launch", (), 5e-6),
        host="ada",
    )
    bob = replace(ada, host="bob", workers=1, threads=4, granted=0.55, beside={}, rates=(0.08,))
    links = (
        link("send", point(2**10, 167e-6), point(2**20, 330e-6)),
        link("all_reduce", point(2**10, 300e-6), point(2**20, 1e-3), point(2**26, 60e-3)),
        link("send", point(2**10, 400e-6), point(2**22, 36e-3), scope="between"),
        link("swap_parts", point(2**10, 500e-6), point(2**22, 38e-3), scope="between", ranks=3),
    )
    slow = ("the device of worker 2 on bob computes 12 times slower than the fastest; look why",)
    text = measurements_table(replace(measured(*links, devices=(ada, bob)), complaints=slow)) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8"), "if the new text is right, write it by UPDATE_GOLDEN=1"
