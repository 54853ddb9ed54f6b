"""What a checkpoint brings back: every bit of weights and moments on any number of ranks, and the same future."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from plait.checkpoint.manifest import tensor_names
from plait.checkpoint.store import staging_for, verify_checkpoint
from plait.checkpoint.transfer import read_tensor
from plait.errors import PlaitError, RunFailed
from plait.parallel.communicator import ONE_PROCESS
from plait.trainer.assemble import assemble
from plait.trainer.checkpointing.persist import all_finite, restore
from tests.matrix import few_fast
from tests.trainer.tiny import make_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("persist")
    make_tiny(folder)
    return folder


def tensors(checkpoint: Path) -> dict[str, Tensor]:
    manifest = verify_checkpoint(checkpoint)
    names = [name for name in tensor_names(manifest) if not name.startswith("rng/")]
    return {name: read_tensor(checkpoint, manifest, name) for name in names}


def saved(run_ranks, folder: Path, workers: int, *, old: Path | None, new: str, steps: int) -> Path:
    asked = {"folder": str(folder), "old": str(old) if old else None, "new": str(folder / new), "steps": steps}
    run_ranks("restore_and_save", json.dumps(asked), workers)
    (found,) = (folder / new).iterdir()
    return found


def test_other_numbers_of_ranks_restore_every_bit(run_ranks, folder: Path) -> None:
    two = saved(run_ranks, folder, 2, old=None, new="two", steps=3)
    for workers in (1, 3, 4):
        other = saved(run_ranks, folder, workers, old=two, new=f"by-{workers}", steps=0)
        mine, theirs = tensors(other), tensors(two)
        assert mine.keys() == theirs.keys() and {"adam_step", "tokens"} < mine.keys()
        assert any(name.startswith("adam_m/") and bool(value.any()) for name, value in mine.items())
        assert all(torch.equal(mine[name], theirs[name]) for name in mine), workers
        assert verify_checkpoint(other).cursor == verify_checkpoint(two).cursor == 3 * 7
        assert sum(name.startswith("rng/") for name in tensor_names(verify_checkpoint(other))) == workers


@pytest.mark.parametrize("workers", few_fast([1, 3], 3))
def test_going_on_gives_the_bits_of_never_having_stopped(run_ranks, folder: Path, workers: int) -> None:
    whole = saved(run_ranks, folder, workers, old=None, new=f"whole-{workers}", steps=7)
    half = saved(run_ranks, folder, workers, old=None, new=f"half-{workers}", steps=3)
    rest = saved(run_ranks, folder, workers, old=half, new=f"rest-{workers}", steps=4)
    assert (rest / "manifest.json").read_bytes() == (whole / "manifest.json").read_bytes()
    assert int(tensors(rest)["adam_step"][0]) == 7


@pytest.mark.parametrize("where", few_fast([0.1, 0.9], 0.9))
def test_damage_is_found_by_whichever_rank_hashes_it_and_told_by_all(
    run_ranks, folder: Path, tmp_path: Path, where: float
) -> None:
    old = saved(run_ranks, folder, 2, old=None, new=f"damaged-{where}", steps=1)
    file = max(old.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    part = min(verify_checkpoint(old).parts, key=lambda part: abs(part.begin - where * file.stat().st_size))
    data = bytearray((old / part.file).read_bytes())
    data[part.begin] ^= 1
    (old / part.file).write_bytes(data)
    asked = {"folder": str(folder), "old": str(old), "new": str(tmp_path), "steps": 0}
    with pytest.raises(RunFailed, match=r"is damaged: the bytes of .* do not match manifest.json; move .* away"):
        run_ranks("restore_and_save", json.dumps(asked), 3)


@pytest.fixture(scope="module")
def sgd_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sgd")
    make_tiny(folder, "optimizer.kind=sgd", "optimizer.lr=0.1", precision="float64")
    return folder


def test_sgd_s_momentum_is_its_only_state_and_is_carried_to_other_numbers_of_ranks(run_ranks, sgd_folder: Path) -> None:
    whole = tensors(saved(run_ranks, sgd_folder, 1, old=None, new="whole", steps=7))
    half = saved(run_ranks, sgd_folder, 2, old=None, new="half", steps=3)
    assert {name.partition("/")[0] for name in tensors(half)} == {"model", "sgd_momentum", "tokens"}
    rest = tensors(saved(run_ranks, sgd_folder, 3, old=half, new="rest", steps=4))
    assert whole.keys() == rest.keys()
    assert any(name.startswith("sgd_momentum/") and bool(value.any()) for name, value in whole.items())
    for name, value in whole.items():
        torch.testing.assert_close(rest[name], value, rtol=1e-11, atol=1e-11)


def test_muon_s_one_momentum_and_adamw_s_two_are_carried_to_other_numbers_of_ranks(run_ranks, tmp_path: Path) -> None:
    make_tiny(tmp_path, "optimizer.kind=muon", "optimizer.lr=0.01", precision="float64")
    whole = tensors(saved(run_ranks, tmp_path, 1, old=None, new="whole", steps=7))
    half = saved(run_ranks, tmp_path, 2, old=None, new="half", steps=3)
    kinds: dict[str, set[str]] = {}
    for kind, _, name in (one.partition("/") for one in tensors(half)):
        kinds.setdefault(name, set()).add(kind)
    assert kinds["layers.0.attention.q.weight"] == {"model", "muon_momentum"}
    assert kinds["embed.tokens.weight"] == kinds["norm.weight"] == {"model", "adam_m", "adam_v"}
    rest = tensors(saved(run_ranks, tmp_path, 3, old=half, new="rest", steps=4))
    assert whole.keys() == rest.keys() and int(rest["adam_step"][0]) == 7
    assert any(name.startswith("muon_momentum/") and bool(value.any()) for name, value in whole.items())
    for name, value in whole.items():
        torch.testing.assert_close(rest[name], value, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("rank", few_fast([0, 1], 1))
def test_whichever_rank_cannot_write_its_reason_is_told(run_ranks, folder: Path, tmp_path: Path, rank: int) -> None:
    staging = staging_for(tmp_path, 1)
    staging.mkdir()
    (staging / f"rank-{rank:05d}.safetensors").symlink_to("/dev/full")
    asked = {"folder": str(folder), "old": None, "new": str(tmp_path), "steps": 1}
    with pytest.raises(
        RunFailed,
        match=r"could not save the checkpoint \(No space left on device.*earlier checkpoints, if .* whole",
    ):
        run_ranks("restore_and_save", json.dumps(asked), 2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rank", few_fast([0, 1], 1))
def test_weights_that_are_not_finite_are_not_saved(run_ranks, folder: Path, tmp_path: Path, rank: int) -> None:
    asked = {"folder": str(folder), "old": None, "new": str(tmp_path), "steps": 1, "poisoned": rank}
    with pytest.raises(RunFailed, match=r"model/.* is not finite after step 1, .* not saved: the run diverged"):
        run_ranks("restore_and_save", json.dumps(asked), 2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("at", [0, 517, 999])
def test_one_number_that_is_not_finite_is_found_wherever_it_lies(dtype: torch.dtype, at: int) -> None:
    numbers = torch.randn(10, 100).to(dtype)
    assert all_finite(numbers) and all_finite(numbers[:0]) and all_finite(torch.finfo(dtype).max * numbers.sign())
    for bad in (float("nan"), float("inf"), -float("inf")):
        numbers.view(-1)[at] = bad
        assert not all_finite(numbers), bad


def test_a_checkpoint_of_another_shape_is_refused(run_ranks, folder: Path, tmp_path: Path) -> None:
    checkpoint = saved(run_ranks, folder, 1, old=None, new="narrow", steps=1)
    config, plan = make_tiny(tmp_path, "model.width=32")
    wider = assemble(config, plan, sums=ONE_PROCESS, stages=())
    with pytest.raises(PlaitError, match=r"has width 16, the recipe asks 32; take the recipe that the run began with"):
        restore(wider, checkpoint, verify_checkpoint(checkpoint), ONE_PROCESS)


@pytest.mark.parametrize(
    ("kind", "momentum", "wanted"),
    [
        ("adamw", "auto", "adam_m, adam_v"),
        ("muon", "auto", "adam_m, adam_v, muon_momentum"),
        ("sgd", "0", "no moments"),
        ("sgd", "0.9", None),
    ],
)
def test_a_checkpoint_of_another_optimizer_is_refused(
    run_ranks, sgd_folder: Path, tmp_path: Path, kind: str, momentum: str, wanted: str | None
) -> None:
    checkpoint = saved(run_ranks, sgd_folder, 1, old=None, new=f"once-{kind}-{momentum}", steps=1)
    config, plan = make_tiny(
        tmp_path, f"optimizer.kind={kind}", "optimizer.lr=0.1", f"optimizer.momentum={momentum}", precision="float64"
    )
    other = assemble(config, plan, sums=ONE_PROCESS, stages=())
    if wanted is None:
        assert restore(other, checkpoint, verify_checkpoint(checkpoint), ONE_PROCESS).step == 1
        return
    with pytest.raises(PlaitError, match=f"has sgd_momentum, the recipe's optimizer keeps {wanted}; take the recipe"):
        restore(other, checkpoint, verify_checkpoint(checkpoint), ONE_PROCESS)
