"""Publishing, verifying, choosing and pruning checkpoints."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from plait.checkpoint.durable import earlier_checkpoints
from plait.checkpoint.file_check import HashShare
from plait.checkpoint.fitting import check_model, check_weights
from plait.checkpoint.manifest import manifest_text, tensor_names
from plait.checkpoint.store import (
    FoundCheckpoint,
    checkpoint_for,
    clean_staging,
    newest_good,
    prune,
    publish,
    staging_for,
    verify_checkpoint,
)
from plait.checkpoint.transfer import TensorSlice, whole_slice, write_rank
from plait.errors import PlaitError, RunFailed

FILES = ("manifest.json", "rank-00000.safetensors", "rank-00001.safetensors")


def good(folder: Path) -> FoundCheckpoint:
    found = newest_good(folder)
    assert found is not None
    return found


def test_a_checkpoint_holds_only_manifest_and_rank_files_that_safetensors_reads(folder, save):
    final = save(folder, 3)
    assert sorted(path.name for path in final.iterdir()) == list(FILES)
    assert [path.name for path in folder.iterdir()] == ["step-3"]
    manifest = verify_checkpoint(final)
    assert (manifest.step, manifest.cursor, manifest.model["width"]) == (3, 96, 256)
    names = ["model/half", "model/norm", "model/wide", "rng/rank-0", "rng/rank-1", "state/tokens"]
    assert tensor_names(manifest) == names
    plain = load_file(final / "rank-00001.safetensors")
    assert plain.keys() == {"model/half", "model/wide[3:6,0:4]", "rng/rank-1", "state/tokens"}
    assert plain["model/half"].dtype == torch.bfloat16 and plain["state/tokens"].item() == 3000


def test_equal_runs_have_equal_bytes_wherever_they_ran(tmp_path, save):
    for run in ("a", "another"):  # a run's folder is not made by those who save into it
        (tmp_path / run).mkdir()
    one, other = save(tmp_path / "a" / "checkpoints", 3), save(tmp_path / "another" / "place", 3)
    assert all((one / name).read_bytes() == (other / name).read_bytes() for name in FILES)


def test_order_of_names_and_fields_leaves_no_trace(folder):
    tensors = {"model/b": torch.ones(3), "model/a": torch.zeros(2), "model/c": torch.ones(2, dtype=torch.float64)}
    texts = []
    for step, names in ((1, sorted(tensors)), (1, sorted(tensors, reverse=True))):
        write_rank(staging_for(folder, step), 0, {name: whole_slice(tensors[name]) for name in names})
        model: dict[str, object] = dict.fromkeys(names, 1)
        publish(staging_for(folder, step), checkpoint_for(folder, step), step=1, cursor=0, model=model, world_size=1)
        texts.append([path.read_bytes() for path in sorted(checkpoint_for(folder, step).iterdir())])
    assert texts[0] == texts[1]


def test_the_manifest_reads_like_this(folder):
    write_rank(
        staging_for(folder, 7),
        0,
        {"model/a": whole_slice(torch.tensor([1.0, 2.0])), "rng/rank-0": whole_slice(torch.tensor(5))},
    )
    final = checkpoint_for(folder, 7)
    publish(staging_for(folder, 7), final, step=7, cursor=56, model={"width": 2}, world_size=1)
    golden = Path(__file__).parent / "manifest.golden.json"
    assert (final / "manifest.json").read_text() == golden.read_text()


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_found_and_the_file_named(folder, save, name):
    path = save(folder, 1) / name
    data = path.read_bytes()
    for index in range(len(data)):
        flipped = bytearray(data)
        flipped[index] ^= 1 << (index % 8)
        path.write_bytes(flipped)
        with pytest.raises(PlaitError, match=name):
            verify_checkpoint(path.parent)
    path.write_bytes(data)
    verify_checkpoint(path.parent)


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_short_grown_emptied_or_gone_is_found(folder, save, name):
    path = save(folder, 1) / name
    data = path.read_bytes()
    for damaged in (data[:-1], data[: len(data) // 2], data[:7], b"", data + b"\0", data * 2):
        path.write_bytes(damaged)
        with pytest.raises(PlaitError, match=f"{name} is damaged"):
            verify_checkpoint(path.parent)
    path.unlink()
    with pytest.raises(PlaitError, match=f"{name} is missing"):
        verify_checkpoint(path.parent)
    path.mkdir()
    with pytest.raises(PlaitError, match=f"{name} is missing"):
        verify_checkpoint(path.parent)


def test_swapped_shards_are_found(folder, save):
    final = save(folder, 1)
    one, other = final / FILES[1], final / FILES[2]
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    with pytest.raises(PlaitError, match=r"rank-0000[01].safetensors is damaged"):
        verify_checkpoint(final)


def test_swapped_parts_inside_a_file_are_found(folder):
    tensors = {"model/a": whole_slice(torch.zeros(4)), "model/b": whole_slice(torch.ones(4))}
    write_rank(staging_for(folder, 1), 0, tensors)
    final = checkpoint_for(folder, 1)
    publish(staging_for(folder, 1), final, step=1, cursor=0, model={}, world_size=1)
    path = final / FILES[1]
    data = path.read_bytes()
    path.write_bytes(data[:-32] + data[-16:] + data[-32:-16])
    with pytest.raises(PlaitError, match="the bytes of model/a do not match"):
        verify_checkpoint(final)


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_step_is_found_and_the_older_checkpoint_taken(folder, save, name):
    older, newer = save(folder, 1), save(folder, 2)
    shutil.copy(older / name, newer / name)
    found = good(folder)
    assert found.path == older and found.manifest.step == 1
    assert len(found.skipped) == 1 and str(newer) in found.skipped[0]


def test_a_whole_checkpoint_under_a_wrong_name_is_not_taken(folder, save):
    shutil.copytree(save(folder, 1), folder / "step-9")
    assert good(folder).path.name == "step-1"
    assert "step-9" in good(folder).skipped[0]


def test_no_checkpoint_is_none_but_no_whole_checkpoint_is_an_error(folder, save):
    assert newest_good(folder) is None
    assert newest_good(folder / "not-there") is None
    (save(folder, 1) / FILES[1]).unlink()
    with pytest.raises(PlaitError, match=r"the only checkpoint in .* is not whole \(.* is missing\); bring one back"):
        newest_good(folder)
    (save(folder, 2) / FILES[1]).unlink()
    with pytest.raises(PlaitError, match=r"none of the 2 checkpoints .* is whole .*rank-00000.safetensors") as caught:
        newest_good(folder)
    assert caught.value.exit_code == 2


def test_a_failed_save_speaks_of_earlier_checkpoints_only_where_there_are_some(folder, save):
    texts = [earlier_checkpoints(folder), save(folder, 1) and earlier_checkpoints(folder)]
    assert texts == ["earlier checkpoints, if there are any, are whole", "earlier checkpoints are whole"]


def test_the_newest_step_is_found_by_number_not_by_spelling(folder, save):
    for step in (9, 10, 100):
        save(folder, step)
    (folder / "step-0200").mkdir()
    (folder / "notes.txt").write_text("mine")
    assert good(folder).path.name == "step-100"


@pytest.mark.parametrize("keep", [1, 2, 3, 4, 5])
def test_prune_keeps_as_many_as_asked(folder, save, keep):
    for step in range(1, 5):
        save(folder, step)
    prune(folder, keep, whole=range(1, 5))
    assert sorted(path.name for path in folder.iterdir()) == [f"step-{step}" for step in range(1, 5)][-keep:]


def test_prune_clears_what_an_earlier_start_wrote_late(folder, save):
    for step in (1, 2):
        save(folder, step)
    late, under_way = (staging_for(folder, step, generation=1) for step in (1, 3))
    for one in (late, under_way):
        one.mkdir()
        (one / "rank-0.json").write_text("[]")
    prune(folder, 2, whole={1, 2})
    assert not late.exists() and under_way.exists()


def test_prune_keeps_the_young_ones_besides(folder, save):
    for step, age_s in ((1, 7200), (2, 3500), (3, 3700), (4, 0), (5, 0)):
        made = time.time() - age_s
        os.utime(save(folder, step) / "manifest.json", (made, made))
    prune(folder, keep=1, whole=range(1, 6), keep_s=3600)
    assert sorted(path.name for path in folder.iterdir()) == ["step-2", "step-4", "step-5"]
    prune(folder, keep=1, whole=range(1, 6))
    assert [path.name for path in folder.iterdir()] == ["step-5"]


def test_prune_keeps_the_newest_whole_ones_and_counts_damaged_ones_for_nothing(folder, save):
    for step in range(1, 6):
        save(folder, step)
    (folder / "step-5" / FILES[1]).write_bytes(b"")
    prune(folder, keep=2, whole=range(1, 6))
    assert sorted(path.name for path in folder.iterdir()) == ["step-3", "step-4", "step-5"]
    (folder / "step-4" / FILES[2]).unlink()
    prune(folder, keep=1, whole=range(1, 6))
    assert sorted(path.name for path in folder.iterdir()) == ["step-3", "step-4", "step-5"]
    assert good(folder).manifest.step == 3


def test_prune_reads_no_part_and_leaves_what_nobody_verified(folder, save):
    """Until enough newer ones are known: step-2 may be damaged, so it neither counts nor is it deleted before."""
    for step in range(1, 5):
        save(folder, step)
    for path in folder.glob("step-*/*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")  # whoever hashed it would find it damaged
    prune(folder, keep=2, whole={4})
    assert sorted(path.name for path in folder.iterdir()) == [f"step-{step}" for step in range(1, 5)]
    save(folder, 5)
    prune(folder, keep=2, whole={4, 5})
    assert sorted(path.name for path in folder.iterdir()) == ["step-4", "step-5"]


def test_shares_of_the_hashing_are_one_whole_check(folder, save):
    """Whatever byte is damaged, exactly one share finds it."""
    final = save(folder, 1)
    parts = verify_checkpoint(final).parts
    for count in (1, 2, 3, 7):
        for file in {part.file for part in parts}:
            own = sorted((part for part in parts if part.file == file), key=lambda part: part.begin)
            dealt = [part for index in range(count) for part in HashShare(index=index, count=count).of(own)]
            assert dealt == own, "every part once"
    part = max(parts, key=lambda part: part.nbytes)
    data = bytearray((final / part.file).read_bytes())
    data[part.begin] ^= 1
    (final / part.file).write_bytes(data)
    found = []
    for index in range(3):
        try:
            verify_checkpoint(final, HashShare(index=index, count=3))
        except PlaitError as error:
            found.append(str(error))
    assert len(found) == 1 and part.key in found[0]


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(folder, save):
    final = save(folder, 2)
    (final / FILES[1]).write_bytes(b"torn")
    save(folder, 2)
    assert good(folder).path == final
    assert [path.name for path in folder.iterdir()] == ["step-2"]


def test_a_checkpoint_moved_aside_for_its_successor_still_counts(folder, save):
    final = save(folder, 2)
    final.rename(folder / ".step-2.replaced")
    assert good(folder).manifest.step == 2
    clean_staging(folder)
    assert good(folder).path == final


def test_clean_staging_removes_leftovers_and_nothing_else(folder, save):
    save(folder, 1)
    for name in (".step-2.staging", ".step-0.pruned", ".step-1.replaced", ".mine"):
        (folder / name).mkdir()
    clean_staging(folder)
    assert sorted(path.name for path in folder.iterdir()) == [".mine", "step-1"]
    clean_staging(folder / "not-there")


def test_stale_files_of_a_wider_attempt_do_not_come_along(folder, save):
    staging_for(folder, 1).mkdir()
    (staging_for(folder, 1) / "rank-00002.safetensors").write_bytes(b"old")
    assert sorted(path.name for path in save(folder, 1).iterdir()) == list(FILES)


def test_a_hole_an_overlap_and_a_missing_rank_are_refused_at_publishing(folder, save):
    save(folder, 1)
    row = torch.ones(1, 4)
    for second, world_size, why in ((2, 2, "hole"), (0, 2, "overlap"), (1, 3, "rank-00002.json")):
        staging = staging_for(folder, 2)
        write_rank(staging, 0, {"model/w": TensorSlice(tensor=row.expand(2, 4), shape=(4, 4), offset=(0, 0))})
        write_rank(staging, 1, {"model/w": TensorSlice(tensor=row, shape=(4, 4), offset=(second, 0))})
        with pytest.raises(RunFailed, match=why):
            publish(staging, checkpoint_for(folder, 2), step=2, cursor=0, model={}, world_size=world_size)
        assert [path.name for path in folder.iterdir()] == ["step-1"]


def test_a_checkpoint_that_lacks_a_weight_is_not_published(folder, save):
    save(folder, 1)
    staging, final = staging_for(folder, 2), checkpoint_for(folder, 2)
    for needs, lacks in ((("model/a",), False), (("model/a", "model/b"), True)):
        write_rank(staging, 0, {"model/a": whole_slice(torch.ones(2))})
        with pytest.raises(RunFailed, match="no worker wrote model/b") if lacks else nullcontext():
            publish(staging, final, step=2, cursor=0, model={}, world_size=1, needs=needs)
    assert sorted(path.name for path in folder.iterdir()) == ["step-1", "step-2"]


def test_a_checkpoint_of_another_model_is_refused_by_the_first_field_that_differs(folder, save):
    manifest = verify_checkpoint(save(folder, 1))
    check_model(manifest, {"layers": 2, "width": 256, "rope_theta": 1e4, "tied": True})
    with pytest.raises(PlaitError, match="this checkpoint has width 256, the recipe asks 320; "):
        check_model(manifest, {"layers": 2, "width": 320, "rope_theta": 5e5, "tied": True})
    with pytest.raises(PlaitError, match="has tied True, the recipe asks None"):
        check_model(manifest, {"layers": 2, "width": 256, "rope_theta": 1e4})


def test_weights_that_are_not_there_in_their_size_are_refused(folder, save):
    manifest = verify_checkpoint(save(folder, 1))
    check_weights(manifest, {"norm": (8,), "wide": (6, 4)})
    with pytest.raises(PlaitError, match="this checkpoint's wide has 6 × 4 numbers, the run's has 6 × 4000; "):
        check_weights(manifest, {"wide": (6, 4000)})
    with pytest.raises(PlaitError, match="has no tensor model/wider"):
        check_weights(manifest, {"norm": (8,), "wider": (6, 4)})


def test_a_manifest_is_text_made_of_its_values_alone(folder, save):
    final = save(folder, 1)
    assert manifest_text(verify_checkpoint(final)) == (final / "manifest.json").read_text()
