"""Whether layers are compiled follows the recipe and the machine, is said, and is priced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from plait.errors import PlaitError
from plait.model.attention import Documents
from plait.model.gpt import GPT
from plait.model.init import initialize
from plait.model.shape import ModelShape, parameter_count
from plait.parallel.sharded_model import WHOLE_VOCABULARY
from plait.planner.calibration.constants import constant_fields
from plait.planner.derive.derived import Derived
from plait.planner.derive.resources import Resources
from plait.planner.derive.training_job import compile_of, precision_of
from plait.trainer import loss
from plait.trainer.score_passes import FusedPasses, InPlacePasses, LocalTargets, ScorePasses
from tests.planner.machines import LAPTOP, ONE_H100, WEB, planned, recipe

NO_COMPILER = replace(ONE_H100, uncompiled="there is no C compiler; install gcc, or name one in CC")
SIZE = ("model.size=1B", "train.budget=100 steps")


def test_compiled_where_it_can_work_and_eager_with_its_price_where_it_cannot(tmp_path: Path) -> None:
    config = recipe(tmp_path, *SIZE)
    compiled, eager = planned(config, WEB, ONE_H100), planned(config, WEB, NO_COMPILER)
    off = planned(recipe(tmp_path, *SIZE, "train.compile=off"), WEB, ONE_H100)
    assert (compiled.arithmetic.compile, eager.arithmetic.compile, off.arithmetic.compile) == ("blocks", "off", "off")
    assert compiled.forecast and eager.forecast and off.forecast
    assert eager.forecast.step_s == off.forecast.step_s > 1.02 * compiled.forecast.step_s
    assert any("layers are not compiled, and steps take longer: there is no C" in why for why in eager.warnings)
    assert planned(recipe(tmp_path, *SIZE, "train.compile=on"), WEB, ONE_H100).arithmetic.compile == "blocks"


def test_gpus_on_which_plait_has_not_run_are_used_with_a_warning(tmp_path: Path) -> None:
    intel = replace(ONE_H100, device="xpu", name="Intel(R) Arc(TM) B580 Graphics")
    plan = planned(recipe(tmp_path, *SIZE), WEB, intel)
    assert (plan.machines.device, plan.arithmetic.precision) == ("xpu", "bf16")
    assert any("plait has not been run on GPUs like Intel(R) Arc(TM) B580" in why for why in plan.warnings)
    assert not any("has not been run" in why for why in planned(recipe(tmp_path, *SIZE), WEB, ONE_H100).warnings)


def test_what_is_asked_for_and_cannot_be_is_refused(tmp_path: Path) -> None:
    config = recipe(tmp_path, *SIZE, "train.compile=on")
    with pytest.raises(PlaitError, match="layers cannot be compiled here: there is no C compiler; install gcc"):
        planned(config, WEB, NO_COMPILER)
    with pytest.raises(PlaitError, match='"on" is for GPUs, and this run is on the processor'):
        planned(config, WEB, LAPTOP)


def test_what_one_host_cannot_do_no_host_is_asked_to_do(tmp_path: Path) -> None:
    """All ranks of a run must compile, or none; and all compute in one precision."""
    config = recipe(tmp_path, *SIZE)
    assert compile_of(config, [ONE_H100, ONE_H100]) == Derived(value="blocks")
    eager = compile_of(config, [ONE_H100, ONE_H100, NO_COMPILER])
    assert eager.value == "off"
    assert "layers are not compiled, and steps take longer: on host 2, there is no C compiler" in eager.warnings[0]
    with pytest.raises(PlaitError, match="layers cannot be compiled on host 1: there is no C compiler; install gcc"):
        compile_of(recipe(tmp_path, *SIZE, "train.compile=on"), [ONE_H100, NO_COMPILER])
    old = replace(ONE_H100, name="an old card", without=("bf16",))
    both = Resources(machine=ONE_H100, peak_flops=1e15, others=(old,))
    assert precision_of(config, Resources(machine=ONE_H100, peak_flops=1e15)).value == "bf16"
    slow = precision_of(config, both)
    assert slow.value == "float32" and "an old card has no bf16" in slow.reasons[-1]
    with pytest.raises(PlaitError, match="an old card has no bf16 arithmetic"):
        precision_of(recipe(tmp_path, *SIZE, "train.precision=bf16"), both)


def test_gpus_without_bf16_train_in_float32_also_where_the_catalogue_lacks_them(tmp_path: Path) -> None:
    old = replace(ONE_H100, name="an old card", without=("bf16",))
    assert planned(recipe(tmp_path, *SIZE), WEB, old).arithmetic.precision == "float32"
    with pytest.raises(
        PlaitError, match=r'old card has no bf16 arithmetic; write train.precision = "fp16" or "float32"'
    ):
        planned(recipe(tmp_path, *SIZE, "train.precision=bf16"), WEB, old)


class MemoryTraffic(TorchDispatchMode):
    """Bytes that operations read and write, products and attention aside; views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        read, made = ([x for x in pytree.tree_leaves(of) if isinstance(x, torch.Tensor)] for of in (args, results))
        shared = {tensor.untyped_storage().data_ptr() for tensor in read}
        is_view = all(x.untyped_storage().data_ptr() in shared for x in made) and not name.endswith("_")
        if not is_view and not name.startswith("empty"):
            self.kernels += 1
            if name not in ("mm", "addmm") and "attention" not in name:
                self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in (*read, *made))
        return results


def attend_in_one_kernel(
    q_bthd: torch.Tensor, k_bthd: torch.Tensor, v_bthd: torch.Tensor, documents: Documents | None, window: int
) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_bthd, k_bthd, v_bthd))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def layer_traffic(width: int, ffn: int, tokens: int = 256) -> tuple[float, int]:
    """Bytes for each token and kernels of one layer's forward pass; casts of weights are counted by micro-batch."""

    def measured(layers: int) -> tuple[MemoryTraffic, int]:
        shape = ModelShape(layers=layers, width=width, heads=width // 64, kv_heads=width // 64, head_width=64, ffn=ffn,
                           vocabulary=64, sequence=tokens)  # fmt: skip
        model = GPT(shape)
        initialize(model, 1)
        for layer in model.layers.values():
            layer.attention.attend = attend_in_one_kernel  # as GPUs do
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), MemoryTraffic() as traffic:
            model(torch.zeros(1, tokens, dtype=torch.long), torch.arange(tokens)[None], None)
        return traffic, parameter_count(shape)

    (one, fewer), (two, more) = measured(1), measured(2)
    return (two.bytes - one.bytes - 6 * (more - fewer)) / tokens, two.kernels - one.kernels


def test_the_price_of_uncompiled_layers_is_what_their_operations_move() -> None:
    constants: dict[str, float] = dict(constant_fields("software_profile_uncompiled"))
    (narrow, kernels), (wide, _), (inner, _) = (
        layer_traffic(*sizes) for sizes in ((256, 512), (512, 512), (256, 1024))
    )
    assert (inner - narrow) / 512 == pytest.approx(constants["inner_bytes"], rel=0.05)
    assert (wide - narrow) / 256 == pytest.approx(constants["stream_bytes"], rel=0.05)
    assert kernels == constants["layer_kernels"]


TOKENS, ENTRIES = 8, 4096


def go_over(passes: ScorePasses) -> None:
    """Losses and gradient of a piece of 16-bit scores."""
    targets = LocalTargets(torch.arange(TOKENS), 0, ENTRIES)
    _, kept = passes.losses(torch.randn(TOKENS, ENTRIES, dtype=torch.bfloat16), targets, WHOLE_VOCABULARY)
    passes.gradient(kept, targets, torch.bfloat16)


class LogitTraffic(MemoryTraffic):
    """Without the picking of one logit a token, of which the mode would count the whole piece."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("gather", "scatter_add_", "randn"):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_the_price_of_an_uncompiled_loss_is_what_its_operations_move() -> None:
    with LogitTraffic() as traffic:
        go_over(InPlacePasses())
    wanted = dict(constant_fields("software_profile_uncompiled"))["logit_bytes"]
    assert traffic.bytes / (TOKENS * ENTRIES) == pytest.approx(wanted, rel=0.02)


def test_the_price_of_a_compiled_loss_is_what_goes_into_its_kernels_and_comes_out() -> None:
    moved = []

    def kernel(function: Any) -> Any:
        def run(*tensors: torch.Tensor | None) -> torch.Tensor:
            result: torch.Tensor = function(*tensors)
            moved.append(sum(tensor.nbytes for tensor in (*tensors, result) if tensor is not None))
            return result

        return run

    go_over(FusedPasses(kernel))
    constants: dict[str, float] = dict(constant_fields("software_profile_plait"))
    assert sum(moved) / (TOKENS * ENTRIES) == pytest.approx(constants["logit_bytes"], rel=0.02)
    assert constants["logits_at_once"] == loss._PIECE_NUMBERS["accelerator"]  # pyright: ignore[reportPrivateUsage]
