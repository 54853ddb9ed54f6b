"""How the commands other than train begin and end on a terminal of 80 columns, word for word."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plait.cli import app
from plait.commands.join import joining_text
from plait.commands.planning.plan_report import make_plan_report, plan_report_text, plan_summary_text, training_section
from plait.commands.probe import probe_start, unsteady_text
from plait.commands.prove import trial_text, winner_text
from plait.commands.sample import SampledText
from plait.commands.verify import verification_start
from plait.hosts.joining import invitation_text
from plait.layout import Layout
from plait.machines.cluster import read_cluster
from plait.machines.measured import Measurements
from plait.model.sizes import explicit_shape
from plait.planner.derive.resources import FixedWorkers, Resources, on_paper
from plait.planner.report.text import comparison_table
from plait.probing.request import model_probe_request, typical_probe_request
from tests.commands.golden import assert_golden
from tests.planner.machines import EIGHT_H100, LAPTOP, PEAK_FLOPS, PLAYS, planned, recipe
from tests.probing.probed import device, link, measured, point, timed

SHAPE = explicit_shape(layers=4, width=128, vocabulary=4096, sequence=256)


def figures() -> Measurements:
    """Two workers of a laptop that were measured while nothing was quiet."""
    laptop = device(
        *(timed(work, (4096, 320, 896), 16e-3) for work in ("product", "product_input", "product_weight")),
        timed("product", (64, 128, 128), 40e-6),
        timed("attention", (16, 256, 10, 10, 32), 18e-3),
        timed("attention_backward", (16, 256, 10, 10, 32), 36e-3),
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
    laptop = replace(laptop, timed=tuple(replace(one, spread=0.4) for one in laptop.timed))
    return measured(link("send", point(2**10, 167e-6), point(2**20, 330e-6)), devices=(laptop,))


def probe_texts(folder: Path) -> Mapping[str, str]:
    found, workers = read_cluster("1xdesktop"), FixedWorkers(workers=2, threads=4)
    model = model_probe_request(SHAPE, sequence=256, sequences=8, device="cpu", precision="float32", threads=4)
    usual, some = typical_probe_request("cuda", 1), replace(EIGHT_H100, devices=2, gpus=(0, 2))
    noisy = replace(found, measured=figures())
    starts = (
        probe_start(LAPTOP, model, workers),
        probe_start(EIGHT_H100, usual, FixedWorkers(workers=8, threads=24)),
        probe_start(some, replace(usual, gpus=(0, 2)), FixedWorkers(workers=2, threads=24)),
    )
    return {
        "probe-start": "\n".join(starts),
        "probe-end": f"{noisy}\n{unsteady_text(noisy, 'plait probe --again')}\nwrote    cluster.json",
        "probe-hosts-start": invitation_text(1, "10.0.0.1:24717", "and, when asked for it, the secret mnbv-cxza"),
    }


def plan_texts(folder: Path) -> Mapping[str, str]:
    config = recipe(folder, "run.name=shakespeare", "train.budget=4 minutes")
    here = make_plan_report(config, Resources(machine=LAPTOP, peak_flops=PEAK_FLOPS[LAPTOP]), top=3)
    first = training_section(None, here.layouts, here.plan.placement.layout)
    with_training = replace(here, training=first)
    large = recipe(folder, "model.size=7B", "train.budget=140B tokens")
    several = [make_plan_report(large, on_paper(read_cluster(text)), top=3) for text in ("8xH100", "2x(8xA100)+400G")]
    trials = [replace(here.layouts[0], step_s=0.25), replace(here.layouts[0], step_s=0.31)]
    return {
        "plan": plan_summary_text(with_training, 80),
        "plan-why": plan_report_text(with_training, 80),
        "plan-several": comparison_table(several, 80),
        "plan-prove": "\n".join([*map(trial_text, trials), winner_text(here.plan.placement.layout)]),
    }


def other_texts(folder: Path) -> Mapping[str, str]:
    plan = planned(recipe(folder, "layout.replicate=2", "train.budget=60 steps"), PLAYS, LAPTOP)
    split = replace(plan, placement=replace(plan.placement, layout=Layout(tensor=2, pipeline=2)))
    pieces = chain(["KING HENRY."], iter(["\nWhat", " say", " you", ", my", " lord", "?"]))
    return {
        "verify-start": f"{verification_start(split, 2)}\n{verification_start(split, 8)}",
        "join-start": joining_text("10.0.0.1:24717"),
        "sample": str(SampledText(pieces)),
    }


@pytest.mark.parametrize("texts", [probe_texts, plan_texts, other_texts])
def test_they_begin_and_end_like_this(texts: Callable[[Path], Mapping[str, str]], tmp_path: Path) -> None:
    for name, told in texts(tmp_path).items():
        assert_golden(name, told.rstrip("\n"))


def test_new_begins_and_ends_like_this(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_golden("new", CliRunner().invoke(app, ["new", "first"]).stdout.rstrip("\n"))
