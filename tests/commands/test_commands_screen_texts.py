"""How commands begin and end on a terminal of 80 columns, word for word; UPDATE_GOLDEN=1 writes the texts again."""

from __future__ import annotations

from dataclasses import replace
from math import nan
from pathlib import Path

import pytest

from plait.commands.evaluate import evaluation_of
from plait.commands.join import ending_text
from plait.commands.monitoring.finish import finished_text, run_end
from plait.commands.monitoring.starting import resumed_text
from plait.commands.monitoring.training import stopped_text
from plait.commands.planning.introduction import run_start
from plait.commands.train import stopped_early_text
from plait.errors import RunFailed
from plait.hosts.joining import invitation_text
from plait.layout import Layout
from plait.machines.measured import ProductRate, ProductRates
from plait.planner.derive.arithmetic import ProcessorArithmetic, choose_backends, choose_precision
from plait.planner.plan import HostShare, Plan
from plait.proof import Finding, Verdict
from plait.report.bottleneck import Remedy, RunBottleneck
from plait.report.metrics import StepReport
from plait.report.receipt import Receipt
from plait.screen.screen import wrapped
from plait.trainer.divergence import DivergenceWatch
from tests.commands.golden import assert_golden
from tests.planner.machines import EIGHT_H100, LAPTOP, PLAYS, WEB, planned, recipe

RUN = Path("runs/shakespeare")
LOSSES = [8.3 / (1 + step / 60) ** 0.4 for step in range(800)]
RECEIPT = Receipt(
    steps=800,
    tokens=1_638_400,
    world_size=2,
    layout=Layout(replicate=2).degrees,
    train_loss=3.21098,
    eval_loss=3.9,
    eval_nats_per_byte=1.5123,
    step_s_median=0.2925,
    predicted_step_s=0.28,
    tokens_per_s=7001.7,
    mfu=0.6012,
    mfu_causal=0.5811,
    peak_tensor_bytes=[150_000_000],
    predicted_peak_bytes_per_device=None,
    peak_rss_bytes=[600_000_000],
    wall_s=251.4,
    device_hours=0.07,
    one_device_step_s=0.5,
    cost_usd=None,
    energy_wh=None,
    versions={"plait": "0.1.0"},
    device="1 × a laptop's processor",
)
LIMITED = replace(
    RECEIPT,
    bottleneck=RunBottleneck(
        cause="network",
        share=0.41,
        sentence="The cable to host b takes 41% of each step.",
        remedies=(
            Remedy(change="a network of 500 Mbit/s instead of 100 Mbit/s", gain=1.52, factor=5.0),
            Remedy(
                change='gradients sent in bf16, which rounds them (train.gradient_transfer = "bf16")',
                gain=1.26,
                setting="train.gradient_transfer=bf16",
            ),
        ),
    ),
)
IMPOSSIBLE = replace(RECEIPT, mfu=1.13, one_device_step_s=0.7, eval_nats_per_byte=None)


def small_run(folder: Path, *overrides: str) -> Plan:
    asked = ("run.name=shakespeare", "train.budget=4 minutes", "layout.replicate=2", *overrides)
    return planned(recipe(folder, *asked), PLAYS, LAPTOP, why_this_layout="searched")


def starts(folder: Path) -> dict[str, str]:
    """The starts of plait train, each as it is printed from its first line on."""
    plan, fast = small_run(folder), small_run(folder, "optimizer.lr=3")
    gpus = planned(recipe(folder, "train.budget=20B tokens", "model.size=1B"), WEB, EIGHT_H100)
    hosts = tuple(HostShare(name=name, workers=1, threads=8) for name in ("ada", "bob", "carl"))
    several = replace(plan, machines=replace(plan.machines, hosts=hosts[:2], left_out=hosts[2:]))
    joined = "joined   bob: 8 cores\njoined   carl: 8 cores"
    invited = invitation_text(2, "10.0.0.1:24717", "and, when asked for it, the secret mnbv-cxza-sdfg-hjkl")
    data = str(PLAYS)
    return {
        "train-start": f"{data}\n{run_start(plan, RUN)}",
        "train-start-why": f"{data}\n{run_start(plan, RUN, ['reasons'])}",
        "train-start-warned": f"{data}\n{run_start(fast, RUN)}",
        "train-start-gpus": f"{WEB}\n{run_start(gpus, Path('runs/web'))}",
        "train-start-hosts": f"{invited}\n{joined}\n{data}\n{run_start(several, RUN)}",
        "train-resume": f"{data}\n{run_start(plan, RUN)}\n{resumed_text(200, plan)}",
    }


def ends(folder: Path) -> dict[str, str]:
    plan = small_run(folder)
    stops = [
        stopped_early_text("SIGINT", has_begun=False),
        stopped_early_text("SIGINT", has_begun=True),
        stopped_text(200, 0, plan),
        stopped_text(200, 200, plan),
        stopped_text(0, 0, plan),
    ]
    findings = tuple(
        Finding(name=f"layers.{layer}.attention.o.weight", kind=kind, error=error, tolerance=1e-10)
        for layer, kind, error in ((3, "gradient", 2.4e-15), (12, "sums", 1.1e-15))
    )
    right = Verdict(layout=Layout(tensor=2), findings=findings)
    wrong = replace(right, findings=(replace(findings[0], error=0.3), findings[1]))
    return {
        "train-end": run_end(RECEIPT, RUN, LOSSES, "utf-8"),
        "train-end-ascii": run_end(RECEIPT, RUN, LOSSES, "ascii"),
        "train-end-limited": run_end(LIMITED, RUN, LOSSES, "utf-8"),
        "train-end-impossible": run_end(IMPOSSIBLE, RUN, LOSSES, "utf-8"),
        "train-finished": f"{finished_text(RUN)}\n{run_end(RECEIPT, RUN, LOSSES, 'utf-8')}",
        "train-interrupted": "\n".join(stops),
        "train-diverged": f"plait: {diverged_sentence()}",
        "join-end": "\n".join(ending_text(by) for by in ("finished", "SIGTERM", "not needed")),
        "data-end": f"{PLAYS}\nready    .plait/data/f00dcafe",
        "verify-end": f"{right}\n{wrong}",
    }


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("told")
    return starts(folder) | ends(folder)


def diverged_sentence() -> str:
    """As a run says it whose losses stop being numbers after its checkpoint of step 400."""
    watch = DivergenceWatch(400)
    for step in range(450, 460):
        numbers = {"loss": nan, "grad_norm": nan, "lr": 3.0, "step_s": 0.3, "tokens_per_s": 7000.0, "data_wait_s": 0.0}
        watch.add(StepReport(step=step, tokens=2048 * step, mfu=None, **numbers))
    with pytest.raises(RunFailed) as failure:
        watch.end_if_diverged(run_ends=False)
    return str(failure.value)


@pytest.mark.parametrize(
    "name",
    [
        *("train-start", "train-start-why", "train-start-warned", "train-start-gpus", "train-start-hosts"),
        *("train-resume", "train-end", "train-end-ascii", "train-end-impossible"),
        *("train-end-limited", "train-finished"),
        *("train-interrupted", "train-diverged", "join-end", "data-end", "verify-end"),
    ],
)
def test_a_command_begins_and_ends_like_this_in_80_columns(name: str, told: dict[str, str]) -> None:
    assert_golden(name, told[name])


def test_a_start_has_five_lines_and_an_end_six(told: dict[str, str]) -> None:
    for name in ("train-start", "train-start-gpus"):
        assert len(wrapped(told[name], 80).splitlines()) == 5, told[name]
    for name in ("train-end", "train-end-ascii"):
        assert len(wrapped(told[name], 80).splitlines()) == 6, told[name]


def test_warnings_are_in_the_short_start_and_other_reasons_are_not(tmp_path: Path, told: dict[str, str]) -> None:
    assert "warning: optimizer.lr = 3 is" in told["train-start-warned"]
    assert told["train-start-warned"].count("·") == 1 and "·" not in told["train-start"]
    assert all(f"· {reason}" in told["train-start-why"] for reason in small_run(tmp_path).reasons)


def product_rates(gain: float) -> ProductRates:
    """Products of a processor that are so many times as fast by oneDNN."""
    default = ProductRate(flops=1e11, error=5e-7, error_ratio=1.0)
    return ProductRates(
        machine="m",
        workers=2,
        library="MKL",
        rates={"default": default, "onednn": replace(default, flops=gain * 1e11), "bf16": default},
    )


DEFAULT = choose_backends("default", "float32", [product_rates(1.0)])
BY_ONEDNN = "matrix products by oneDNN: 2.3 times as fast as MKL, as exact"
IN_BF16 = "bf16 with float32 weights: a step is 1.6 times as fast as in float32"


@pytest.mark.parametrize(
    ("chosen", "lines"),
    [
        (choose_backends("auto", "float32", [product_rates(2.3)]), [f"numbers  {BY_ONEDNN}"]),
        (choose_backends("auto", "float32", [product_rates(1.0)]), []),
        (DEFAULT.with_precision(choose_precision(1.64)), [f"numbers  {IN_BF16}"]),
        (DEFAULT.with_precision(choose_precision(1.1)), []),
    ],
)
def test_a_start_names_arithmetic_that_is_faster_than_the_default(
    chosen: ProcessorArithmetic, lines: list[str], tmp_path: Path
) -> None:
    plan = replace(small_run(tmp_path), faster_arithmetic=chosen.headline)
    told = wrapped(run_start(plan, RUN), 80).splitlines()
    assert len(told) == 4 + len(lines)
    assert [text for text in told if text.startswith("numbers")] == lines


def test_a_run_that_goes_on_by_its_plan_does_not_repeat_warnings(tmp_path: Path) -> None:
    warned = small_run(tmp_path, "optimizer.lr=3")
    assert "warning: " in run_start(warned, RUN)
    assert "warning: " not in run_start(warned, RUN, start="known plan")
    assert "warning: " in run_start(warned, RUN, ["reasons"], "known plan"), "--why gives all reasons"


def test_an_evaluation_is_one_line_of_json() -> None:
    line = (
        '{"step": 800, "eval_loss": 3.9, "eval_nats_per_byte": 1.5, "nats_per_token": 3.9, "nats_per_byte": 1.5, '
        '"tokens": 1000, "bytes": 2600}'
    )
    found = evaluation_of(800, 3900.0, 1000, 2600)
    assert str(found) == line and "<td>3.9</td>" in found._repr_html_()
