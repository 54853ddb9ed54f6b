"""A stranger's model folder leads to no file outside of it: links are followed inside and to the hub's own blobs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from plait.commands.export import write_export
from plait.commands.models.opened_model import open_model
from plait.commands.preparing.base import keep_base_files, model_folder
from plait.errors import PlaitError
from plait.interop.adapter_in import read_adapter
from plait.interop.base_model import read_base_model
from plait.run_folder import run_folder
from plait.screen.screen import SilentScreen
from plait.working_folder import WorkingFolder
from tests.commands.test_commands_export import learns_chats, saved_run
from tests.interop.folders import write_model
from tests.interop.test_interop_peft import random_adapter, written
from tests.matrix import slow

SECRET = "a private sentence"
READ_OR_COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "chat_template.jinja",
    "additional_chat_templates/tools.jinja",
    "LICENSE",
    "LICENCE.md",
    "NOTICE.txt",
    "COPYING",
    "USE_POLICY.md",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write_model(tmp_path / "base")
    (tmp_path / "private.txt").write_text(SECRET)
    return tmp_path / "base"


@pytest.mark.parametrize("name", READ_OR_COPIED)
@pytest.mark.parametrize("how", ["absolute", "relative", "folder", "hub"])
def test_a_link_that_leads_out_is_refused_by_name(name: str, how: str, base: Path) -> None:
    outside = base.parent / "private.txt"
    if how == "hub":  # blobs that lead out themselves
        moved = base.parent / "models--a--b" / "snapshots" / "c0ffee"
        moved.parent.mkdir(parents=True)
        base = base.rename(moved)
        blobs = base.parent.parent / "blobs"
        blobs.mkdir()
        (blobs / "feed").symlink_to(outside)
        outside = blobs / "feed"
    link = base / name
    link.unlink(missing_ok=True)
    if how == "folder":
        if link.parent == base:
            pytest.skip("it lies in no folder of its own")
        (base.parent / "elsewhere").mkdir()
        (base.parent / "elsewhere" / link.name).write_text(SECRET)
        link.parent.symlink_to(base.parent / "elsewhere")
    else:
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(os.path.relpath(outside, link.parent) if how == "relative" else outside)
    with pytest.raises(PlaitError) as refused:
        model_folder(str(base), WorkingFolder(base.parent))
    assert f"{name} in {base} is a link to a file outside of that folder" in str(refused.value)
    with pytest.raises(PlaitError, match="is a link to a file outside"):
        keep_base_files(str(base), base.parent / "kept")
        read_base_model(base)  # weights are read and never copied
    assert not any(SECRET in path.read_text(errors="ignore") for path in (base.parent / "kept").rglob("*.*"))


def test_a_circle_of_links_is_refused(base: Path) -> None:
    (base / "LICENSE").symlink_to("NOTICE")
    (base / "NOTICE").symlink_to("LICENSE")
    with pytest.raises(PlaitError, match="is a link to a file outside of that folder"):
        model_folder(str(base), WorkingFolder(base.parent))


def test_links_within_the_folder_and_to_it_are_followed(base: Path) -> None:
    (base / "weights").mkdir()
    (base / "model.safetensors").rename(base / "weights" / "one.safetensors")
    (base / "model.safetensors").symlink_to("weights/one.safetensors")
    (base / "LICENSE").write_text("as you like")
    (base / "NOTICE").symlink_to(base / "LICENSE")
    (base.parent / "by another name").symlink_to("base")
    model_folder("by another name", WorkingFolder(base.parent))
    assert open_model("by another name", WorkingFolder(base.parent)).model.shape.layers == 4
    keep_base_files(str(base.parent / "by another name"), base.parent / "kept")
    assert (base.parent / "kept" / "NOTICE").read_text() == "as you like"


def test_a_snapshot_of_the_hubs_cache_is_followed_to_its_blobs(base: Path) -> None:
    snapshot, blobs = base.parent / "models--a--b" / "snapshots" / "c0ffee", base.parent / "models--a--b" / "blobs"
    (snapshot / "additional_chat_templates").mkdir(parents=True)
    blobs.mkdir()
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    for number, file in enumerate(sorted(one for one in base.rglob("*") if one.is_file())):
        shutil.move(file, blobs / str(number))
        link = snapshot / file.relative_to(base)
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    assert open_model(str(snapshot), WorkingFolder(base.parent)).model.shape.layers == 4
    keep_base_files(str(snapshot), base.parent / "kept")
    assert (base.parent / "kept" / "additional_chat_templates" / "tools.jinja").read_text() == "{{ tools }}"


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapters_links_are_no_other(name: str, base: Path) -> None:
    model = read_base_model(base)
    folder = written(base.parent / "adapter", model, random_adapter(model))
    (folder / name).rename(base.parent / name)
    (folder / name).symlink_to(base.parent / name)
    with pytest.raises(PlaitError, match=f"{name} in .* is a link to a file outside of that folder"):
        read_adapter(folder, model.family, model.shape)


@contextmanager
def umask(bits: int) -> Iterator[None]:
    before = os.umask(bits)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize(("bits", "mode", "wanted"), [slow((0o022, 0o600, 0o600)), slow((0o022, 0o644, 0o644)),
                                                     (0o077, 0o644, 0o600), (0o022, 0o777, 0o644),
                                                     slow((0o022, 0o444, 0o644))])  # fmt: skip
def test_a_copy_is_no_more_open_than_its_source_and_than_new_files(
    bits: int, mode: int, wanted: int, tmp_path: Path
) -> None:
    working, _ = saved_run(tmp_path)
    tokenizer, base = learns_chats(working), tmp_path / "base"
    write_model(base)
    shutil.copy(tokenizer / "tokenizer.json", base)
    (base / "LICENSE").write_text("as you like")
    for path in base.iterdir():
        path.chmod(mode)
    with umask(bits):
        keep_base_files(str(base), run_folder("tiny", working).base)
        target = write_export("tiny", Path("out"), screen=SilentScreen(), working=working)
    for folder in (run_folder("tiny", working).base, target):
        for name in ("LICENSE", "tokenizer.json"):
            assert (folder / name).stat().st_mode & 0o777 == wanted, (folder, name)
    assert (target / "config.json").stat().st_mode & 0o777 == 0o666 & ~bits
    assert AutoTokenizer.from_pretrained(target) and json.loads((target / "config.json").read_text())
