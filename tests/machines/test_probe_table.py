"""The table that people read."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from plait.machines.measured import measurements_table
from tests.probing.probed import device, link, measured, point, timed

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
