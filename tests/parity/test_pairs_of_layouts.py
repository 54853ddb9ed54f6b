"""Learning from pairs of answers: one step equals plain torch's with transformers, over layouts one process, and the
bugs that libraries had are caught."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.commands.verifying.gradient_check import check_gradients
from plait.commands.verifying.small_model import shrunk_plan
from plait.layout import Layout
from plait.model.shape import ModelShape
from plait.recipe.load import parse_config
from plait.recipe.schema import RunConfig
from plait.workers import ForkedWorkers
from tests.matrix import few_fast
from tests.parity.cases import FAMILIES, adapted
from tests.parity.conftest import CallMutant
from tests.parity.mutate import MUTANTS
from tests.parity.pairs_case import WAYS, largest_error, losses_and_gradients
from tests.parity.pairs_layout import CONFIG as LORA
from tests.parity.pairs_layout import LAYOUTS

PAIR_MUTANTS = Path(__file__).parent / "pair_mutants"
FULL = parse_config(
    {
        "data": {"files": "none"},
        "model": {"from": "none"},
        "finetune": {"method": "full", "objective": "dpo"},
        "run": {"name": "pairs"},
    }
)
BY_HAND = ("forget-the-reference", "mean-over-tokens", "one-token-short")
"""Mutants that one process shows beside plain torch."""
BY_LAYOUT = {
    "part-of-a-sequence": ("context", PAIR_MUTANTS),
    "every-part-counts": ("context", PAIR_MUTANTS),
    "every-tensor-rank-counts-pairs": ("tensor", PAIR_MUTANTS),
    "mean-of-each-rank": ("unequal", MUTANTS),
    "everybody-counts-alike": ("unequal", MUTANTS),
}
"""Mutants that one process does not show: each with a layout, and where it lies. Those of MUTANTS die in
test_mutants.py each time, and with pairs in `make test-all`."""

LONG: dict[str, tuple[ModelShape, Layout, tuple[int, ...]]] = {
    "replicate": (adapted("gpt2"), Layout(replicate=3), ()),
    "context × tensor, full": (FAMILIES["qwen2"], Layout(context=2, tensor=2), ()),
    "shard": (adapted("qwen2", variant="rslora"), Layout(shard=2, recompute="full"), ()),
    "shard parameters": (adapted("llama"), Layout(shard=4, shard_what="parameters"), ()),
    "shard parameters, full": (FAMILIES["gpt2"], Layout(shard=2, shard_what="parameters"), ()),
    "shard parameters, unequal": (adapted("qwen2"), Layout(shard=3, shard_what="parameters"), (1, 1, 30)),
    "tensor beyond kv heads": (adapted("multi-query"), Layout(tensor=4), ()),
    "tensor, full": (FAMILIES["qwen3"], Layout(tensor=2, recompute="selective"), ()),
    "context": (adapted("windows"), Layout(context=4), ()),
    "context, full": (FAMILIES["gpt2"], Layout(context=3), ()),
    "pipeline, unequal": (adapted("qwen3"), Layout(pipeline=2, stage_layers=(5, 3)), ()),
    "pipeline, tied, full": (FAMILIES["qwen2"], Layout(pipeline=2, stage_layers=(4, 4), schedule="gpipe"), ()),
    "interleaved, full": (
        FAMILIES["gpt2"], Layout(pipeline=2, stage_layers=(2, 3, 2, 1), schedule="interleaved"), (),
    ),
    "zero-bubble": (
        adapted("gpt2"), Layout(pipeline=2, stage_layers=(3, 5), replicate=2, schedule="zero-bubble"), (5, 1),
    ),
    "pipeline × context × tensor": (
        adapted("scaled"), Layout(pipeline=2, stage_layers=(3, 5), context=2, tensor=2), (),
    ),
    "shard × context × tensor": (adapted("llama"), Layout(shard=2, context=2, tensor=2, recompute="full"), ()),
    "zero-bubble × shard × context, full": (
        FAMILIES["llama"], Layout(pipeline=2, stage_layers=(3, 5), shard=2, context=2, schedule="zero-bubble"), (),
    ),
    "pipeline × parameters": (
        FAMILIES["llama"], Layout(pipeline=2, stage_layers=(3, 5), shard=2, shard_what="parameters"), (),
    ),
}  # fmt: skip


def test_one_step_is_plain_torchs_with_transformers(tmp_path: Path) -> None:
    found = losses_and_gradients(tmp_path)
    assert set(found) == set(WAYS) and found["by hand"]["pairs"] > 10
    assert largest_error(found) < 1e-10


def test_every_mutant_is_tried() -> None:
    own = {name for name, (_, folder) in BY_LAYOUT.items() if folder == PAIR_MUTANTS}
    assert {path.stem for path in PAIR_MUTANTS.glob("*.patch")} == own | set(BY_HAND)


@pytest.mark.parametrize("name", BY_HAND)
def test_a_mutant_of_the_loss_is_caught(name: str, call_mutant: CallMutant) -> None:
    assert call_mutant(PAIR_MUTANTS / f"{name}.patch", "error_of_pairs") > 1e-4


@pytest.mark.parametrize(
    "name", few_fast(BY_LAYOUT, *(name for name, (_, folder) in BY_LAYOUT.items() if folder == PAIR_MUTANTS))
)
def test_a_mutant_of_its_sums_is_caught(name: str, call_mutant: CallMutant) -> None:
    layout, folder = BY_LAYOUT[name]
    scope = "all" if name == "every-tensor-rank-counts-pairs" else "gradients"  # margins come with the last step
    assert not call_mutant(folder / f"{name}.patch", "verdict_of_pairs", layout, scope)["ok"]


@pytest.mark.parametrize("name", few_fast(LAYOUTS, "context"))
def test_without_a_mutant_these_layouts_are_right(name: str, workers: ForkedWorkers) -> None:
    check(adapted("llama"), *LAYOUTS[name], workers)


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_any_mix_learns_what_one_process_learns(name: str, workers: ForkedWorkers) -> None:
    check(*LONG[name], workers)


OTHER_LOSSES: dict[str, dict[str, object]] = {
    "orpo": {"objective": "orpo"},
    "simpo": {"objective": "simpo", "label_smoothing": 0.1},
    "dpo without a reference": {"objective": "dpo", "reference": "none", "label_smoothing": 0.1},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*LAYOUTS, "pipeline × context × tensor"])
@pytest.mark.parametrize("loss", OTHER_LOSSES)
def test_other_losses_learn_what_one_process_learns(loss: str, layout: str, workers: ForkedWorkers) -> None:
    shape = adapted("llama")
    cut = LAYOUTS[layout] if layout in LAYOUTS else LONG[layout][1:]
    config = parse_config(
        {
            "data": {"files": "none"},
            "model": {"from": "none"},
            "finetune": {"method": "lora", **OTHER_LOSSES[loss]},
            "run": {"name": "pairs"},
        }
    )
    check(shape, *cut, workers, config)


def check(
    shape: ModelShape,
    layout: Layout,
    shares: tuple[int, ...],
    workers: ForkedWorkers,
    config: RunConfig | None = None,
) -> None:
    config = config or (FULL if shape.adapter is None else LORA)
    verdict = check_gradients(config, shrunk_plan(config, shape, layout, shares), workers)
    assert verdict.ok, "\n".join(f"{one}: {one.error:.1e}" for one in verdict.worst)
    assert ("sums", "pairs") in {(one.kind, one.name) for one in verdict.findings}


def test_there_are_mixes_of_three_strands_with_and_without_adapters() -> None:
    mixes = [shape for shape, layout, _ in LONG.values() if sum(d > 1 for d in layout.degrees.values()) >= 3]
    assert len(mixes) >= 3 and any(shape.adapter is None for shape in mixes)
