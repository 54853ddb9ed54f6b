"""Recipes and overrides: what is read, where paths lead, and the one sentence for each mistake."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from plait.errors import PlaitError
from plait.recipe.load import (
    flat_values,
    load_recipe,
    parse_config,
    parse_override,
    parse_recipe,
    read_saved_recipe,
    recipe_text,
)

MINIMAL = '[data]\nfiles = "a.txt"\n'


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe in one folder, the current folder another."""
    beside, here = tmp_path / "beside", tmp_path / "here"
    beside.mkdir()
    here.mkdir()
    (beside / "a.txt").write_text("text")
    path = beside / "My-Run.toml"
    path.write_text(MINIMAL)
    monkeypatch.chdir(here)
    return path


def refused(path: Path, *overrides: str) -> str:
    with pytest.raises(PlaitError) as caught:
        load_recipe(path, overrides)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2
    return str(caught.value)


def test_only_the_data_must_be_said(recipe: Path) -> None:
    config = load_recipe(recipe)
    assert config.run.name == "my-run"
    assert config.train.budget == config.model.size == config.optimizer.lr == config.layout.replicate == "auto"
    assert config.data.holdout == 0.05 and config.run.seed == 1


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("train.budget=60 steps", "train.budget", "60 steps"),
        ('train.budget="60 steps"', "train.budget", "60 steps"),
        ("train.budget = 20M tokens ", "train.budget", "20M tokens"),
        ("optimizer.lr=3e-4", "optimizer.lr", 3e-4),
        ("optimizer.lr=auto", "optimizer.lr", "auto"),
        ("optimizer.betas=[0.9, 0.99]", "optimizer.betas", [0.9, 0.99]),
        ("optimizer.clip=never", "optimizer.clip", "never"),
        ("model.tied=true", "model.tied", True),
        ("model.size=125M", "model.size", "125M"),
        ("model.size=2.6B", "model.size", "2.6B"),
        ("train.batch_tokens=16384", "train.batch_tokens", 16384),
        ("train.batch_tokens=16M", "train.batch_tokens", 16_000_000),
        ('train.batch_tokens="512K"', "train.batch_tokens", 512_000),
        ("train.batch_tokens=auto", "train.batch_tokens", "auto"),
        ("layout.replicate=4", "layout.replicate", 4),
        ("checkpoint.every=5 minutes", "checkpoint.every", "5 minutes"),
        ("run.name=other", "run.name", "other"),
        ("run.name=auto", "run.name", "my-run"),
    ],
)
def test_an_override_is_a_toml_value_or_bare_text(recipe: Path, override: str, key: str, value: object) -> None:
    assert flat_values(load_recipe(recipe, [override]))[key] == value


def test_the_last_override_wins_and_the_others_stay(recipe: Path) -> None:
    recipe.write_text(MINIMAL + "[train]\nsequence = 8\nbatch_tokens = 64\n")
    config = load_recipe(recipe, ["train.sequence=16", "train.sequence=32"])
    assert (config.train.sequence, config.train.batch_tokens) == (32, 64)


def test_a_path_in_the_recipe_is_beside_it_and_one_given_here_is_here(recipe: Path, tmp_path: Path) -> None:
    assert load_recipe(recipe).data.files == str(tmp_path / "beside" / "a.txt")
    (tmp_path / "here" / "a.txt").write_text("other text")
    assert load_recipe(recipe).data.files == str(tmp_path / "beside" / "a.txt")
    assert load_recipe(recipe, ["data.files=a.txt"]).data.files == str(tmp_path / "here" / "a.txt")
    (tmp_path / "here" / "b.jsonl").write_text("{}")
    assert load_recipe(recipe, ["data.files=b*.jsonl"]).data.files == str(tmp_path / "here" / "b*.jsonl")
    recipe.write_text('[data]\nfiles = "b.jsonl"\n')  # not beside the recipe, but in the current folder
    assert load_recipe(recipe).data.files == str(tmp_path / "here" / "b.jsonl")
    assert load_recipe(recipe, ["data.files=none.txt"]).data.files == str(tmp_path / "here" / "none.txt")


def test_paths_in_lists_tables_and_tokenizers_are_found_too(recipe: Path, tmp_path: Path) -> None:
    recipe.write_text(
        '[data]\nfiles = ["a.txt", {path = "a.txt", weight = 2, field = "body"}, "hf:some/name"]\ntokenizer = "tok"\n'
    )
    (recipe.parent / "tok").mkdir()
    data = load_recipe(recipe).data
    text = str(tmp_path / "beside" / "a.txt")
    one, two, three = data.files
    assert (one, three) == (text, "hf:some/name")
    assert not isinstance(two, str) and (two.path, two.weight, two.field) == (text, 2, "body")
    assert data.tokenizer == str(recipe.parent / "tok")
    assert load_recipe(recipe, ["data.tokenizer=gpt2"]).data.tokenizer == "gpt2"
    assert load_recipe(recipe, ["data.files=hf:tok:test"]).data.files == f"hf:{recipe.parent / 'tok'}:test"


def test_a_saved_recipe_reads_back_the_same(recipe: Path, tmp_path: Path) -> None:
    config = load_recipe(recipe, ["train.budget=60 steps", "optimizer.betas=[0.8, 0.9]", "model.qk_norm=true"])
    saved = tmp_path / "here" / "recipe.toml"
    saved.write_text(recipe_text(config))
    assert load_recipe(saved) == config


def test_a_config_is_frozen(recipe: Path) -> None:
    config = load_recipe(recipe)
    with pytest.raises(ValidationError):
        config.run.seed = 2  # type: ignore[misc]


def test_a_model_to_go_on_from_is_named_by_its_folder_and_brings_its_shape(recipe: Path) -> None:
    (recipe.parent / "base").mkdir()
    config = load_recipe(recipe, ["model.from=base"])
    assert config.model.from_ == str(recipe.parent / "base")
    assert f'from = "{config.model.from_}"' in recipe_text(config)
    assert "\nfrom = " not in recipe_text(load_recipe(recipe))
    assert parse_recipe(recipe_text(config), "the saved one") == config
    assert refused(recipe, "model.from=base", "model.layers=2").startswith(
        "model is not usable: layers comes from the model in model.from; take layers out, or model.from"
    )
    assert refused(recipe, "model.fro=base").endswith("did you mean model.from?")
    assert refused(recipe, 'model.from=""').startswith("model.from is not usable")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("train.budgett=1", ["train.budgett is not a key of the recipe; did you mean train.budget?"]),
        ("trian.budget=1", ["trian", "did you mean train"]),
        ("train.lr=1", ["did you mean optimizer.lr?"]),
        ("optimizer.weight_decy=1", ["did you mean optimizer.weight_decay?"]),
        ("data.zzz=1", ["data.zzz is not a key", "known here are files, tokenizer"]),
        ("train.budget=10 parsecs", ['train.budget is not usable: "10 parsecs" is not an amount', "500 steps"]),
        ("train.budget=-5 steps", ["train.budget is not usable"]),
        ("train.sequence=1", ["train.sequence is not usable", 'at least 2 or "auto"']),
        ("model.layers=0", ['model.layers is not usable: it should be more than 0 or "auto"']),
        ("model.layers=2.5", ["model.layers is not usable"]),
        ("model.norm=batchnorm", ["model.norm is not usable", '"layernorm" or "rmsnorm"']),
        (
            "model.size=huge",
            [
                'model.size is not usable: "huge" is not a size; write a number of parameters, for example "1M", "5M", '
                '"25M", "125M", "350M", "1B", "7B"'
            ],
        ),
        ("model.size=5MB", ['model.size is not usable: "5MB" is not a number; write for example 4096, "125M"']),
        ("data.holdout=0.7", ["data.holdout is not usable", "it should be at most 0.5"]),
        ("optimizer.betas=[0.9]", ["optimizer.betas is not usable"]),
        ("optimizer.kind=adam", ['optimizer.kind is not usable: it should be "adamw", "muon" or "sgd"']),
        ("optimizer.kind=sgd", ['kind = "sgd" needs a learning rate', "write for example optimizer.lr = 0.1"]),
        ("optimizer.momentum=0.9", ["momentum is SGD's and Muon's; remove it, or write optimizer.kind"]),
        ("optimizer.adamw_lr=0.1", ["adamw_lr is only for Muon; set optimizer.lr, or write optimizer.kind"]),
        ("optimizer.momentum=1", ["optimizer.momentum is not usable", "less than 1"]),
        ("optimizer.lr=0", ["optimizer.lr is not usable", "more than 0"]),
        ("optimizer.clip=maybe", ["optimizer.clip is not usable"]),
        ("checkpoint.every=3 tokens", ['checkpoint.every is not usable: "3 tokens" is not an interval']),
        ("checkpoint.keep=0", ["checkpoint.keep is not usable"]),
        ("run.seed=-1", ["run.seed is not usable"]),
        ("run.name=A/B", ['run.name is not usable: "A/B" is not a name']),
        ("data.files=[3]", ["data.files is not usable"]),
        ("data.files=[{weight=1}]", ["data.files is not usable"]),
        ("data.files=[{path=1, weigth=1}]", ["did you mean data.files.weight?"]),
        ("run=3", ['"run=3" is not an override']),
        ("run.=3", ["is not an override"]),
        ("train.budget", ["is not an override", 'train.budget="60 steps"']),
        ("train.budget=60", ["it should be text", 'did you mean "60 minutes" or "60 steps"?']),
        ("train.budget=1", ['did you mean "1 minute" or "1 step"?']),
        ("checkpoint.every=10", ['did you mean "10 minutes" or "10 steps"?']),
        ("checkpoint.every=1" + "0" * 400, ["checkpoint.every is not usable"]),
        ("train.budget=true", ['train.budget is not usable: it should be text or "auto"']),
        (
            "train.batch_tokens=many",
            ['train.batch_tokens is not usable: "many" is not a number; write for example 4096, "125M"'],
        ),
        ("model.tied=perhaps", ['model.tied is not usable: it should be true or false or "auto"']),
        ("optimizer.betas=3", ['optimizer.betas is not usable: it should be a list or "auto"']),
        ("model.layers=1000000000", ['model.layers is not usable: it should be at most 10,000 or "auto"']),
        ("model.vocabulary=1000000000", ["model.vocabulary is not usable", "at most 10,000,000"]),
        (
            f"train.batch_tokens=1{'0' * 30}",
            ["train.batch_tokens is not usable", "at most 1,000,000,000,000"],
        ),
        (f"model.width={'9' * 400}", ["model.width is not usable"]),
        (f"model.width={'9' * 5000}", ["model.width is not usable"]),
        (f"train.budget={'9' * 400} steps", ["999999999999… is too large"]),
        ("optimizer.lr=inf", ["optimizer.lr is not usable"]),
        ("optimizer.lr=nan", ["optimizer.lr is not usable"]),
        ("Train.budget=3", ["Train is not a key of the recipe; did you mean"]),
        ("data.files=~nosuchuser/x", ["names the home of a user who is not here"]),
        (f"model.layers={'[' * 5000}", ["model.layers is nested too deeply"]),
        ("model.layers.x=3", ["model.layers is not usable"]),
    ],
)
def test_mistakes_are_told_in_one_sentence_with_the_key(recipe: Path, override: str, parts: list[str]) -> None:
    sentence = refused(recipe, override)
    assert all(part in sentence for part in parts), sentence
    assert not re.search("Input|equal to|greater|valid", sentence), "words of pydantic"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "does not say data"),
        ("[data]\n", "does not say data.files"),
        ("[data\n", "is not valid TOML"),
        ("[data]\nfiles = my novel.txt\n", 'a text stands in quotes: files = "my novel.txt"'),
        (MINIMAL + "[train]\nbudget = 10 minutes # a try\n", 'a text stands in quotes: budget = "10 minutes"'),
        ("[data]\nfiles = C:\\a.txt\n", "a text stands in quotes: files = 'C:\\a.txt'"),
        ("# a\u2028b\n[data]\nfiles = a.txt\n", 'a text stands in quotes: files = "a.txt"'),
        (MINIMAL + "[train]\nbudget = 0.5\n", 'did you mean "0.5 minutes"?'),
        (MINIMAL + "[model]\nsize = 5M\n", 'a text stands in quotes: size = "5M"'),
        (MINIMAL + "[model]\nsize = \n", 'a text stands in quotes: files = "my.txt"'),
        (MINIMAL + "[optimizer]\nbetas = [0.9, 0.95\n", "correct that line"),
        ("data = 3\n", "data is not usable"),
        ('run = "x"\n' + MINIMAL, "run is not usable"),
        ('"" = 1\n' + MINIMAL, '"" is not a key of the recipe'),
        (MINIMAL + '"\\u001b[31m" = 1\n', r'data."\u001b[31m" is not a key of the recipe'),
        (MINIMAL + "x = " + "[" * 5000 + "\n", "is nested too deeply"),
        (MINIMAL + f"x = {'9' * 5000}\n", "is not valid TOML"),
        (MINIMAL + "[extra]\nkey = 1\n", "extra is not a key of the recipe"),
        (MINIMAL + "[model]\nfrom = 3\n", "model.from is not usable: it should be text"),
    ],
)
def test_recipes_that_say_too_little_or_nonsense(recipe: Path, text: str, part: str) -> None:
    recipe.write_text(text)
    assert part in refused(recipe)


def test_files_that_are_no_recipe(recipe: Path, tmp_path: Path) -> None:
    assert 'did you mean "' in refused(recipe.with_name("My-Rum.toml"))
    assert "give the path of a .toml file" in refused(tmp_path / "nothing" / "x.toml")
    assert "is a folder" in refused(tmp_path)
    recipe.write_bytes(b'[data]\nfiles = "\xff"\n')
    assert "is not UTF-8" in refused(recipe)


def test_an_unknown_key_is_told_before_everything_else(recipe: Path) -> None:
    assert "model.widht" in refused(recipe, "model.layers=0", "model.widht=4")


def test_an_override_becomes_nested_values() -> None:
    assert parse_override("a.b.c=[1, 2]") == {"a": {"b": {"c": [1, 2]}}}
    assert parse_override("a.b=x=y") == {"a": {"b": "x=y"}}


def test_the_shipped_recipes_load() -> None:
    shipped = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
    assert shipped
    for path in shipped:
        config = load_recipe(path)
        assert parse_config(config.model_dump(exclude_none=True, by_alias=True)) == config
        assert isinstance(config.data.files, str)
        file = Path(config.data.files)
        assert file.exists() or file.parent.name == "models"  # which `make chats` brings


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("My Recipe.toml", "my-recipe"),
        ("Müller's Größe.toml", "muller-s-gro-e"),
        ("日本.toml", "run-cf2abf0c"),
        ("-x-.toml", "x"),
        ("a" * 200 + ".toml", "a" * 63),
        (os.fsdecode(b"a\xff.toml"), "a"),
        (os.fsdecode(b"\xff.toml"), "run-a8100ae6"),
    ],
)
def test_a_run_is_named_after_any_file(tmp_path: Path, file: str, name: str) -> None:
    recipe = tmp_path / file
    recipe.write_text(MINIMAL)
    assert load_recipe(recipe).run.name == name


@pytest.mark.parametrize("override", [b"data.files=a\xff.txt", b"run.name=\xff", b"train.budget=\xff", b"mod\xff.x=1"])
def test_what_is_not_utf_8_is_refused_with_the_mend(recipe: Path, override: bytes) -> None:
    with pytest.raises(PlaitError, match="is not UTF-8 text; rename that file or folder, or type the value in UTF-8"):
        load_recipe(recipe, [os.fsdecode(override)])


def test_a_folder_whose_name_is_not_utf_8_is_refused_where_the_recipe_would_have_to_hold_it(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"in\xff")
    folder.mkdir()
    (folder / "r.toml").write_text(MINIMAL)
    with pytest.raises(PlaitError, match="is not UTF-8 text; rename that file or folder"):
        load_recipe(folder / "r.toml")


@pytest.mark.parametrize("path", ["a/b.toml", "x" * 5000 + ".toml", "loop.toml"])
def test_a_path_that_cannot_be_followed_is_a_sentence(tmp_path: Path, path: str) -> None:
    (tmp_path / "a").write_text("")
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    with pytest.raises(PlaitError, match="cannot be read"):
        load_recipe(tmp_path / path)


def test_a_saved_recipe_is_read_without_looking_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a joined host it comes from host 0, which must not learn what files are there."""
    (tmp_path / "private").mkdir()
    (tmp_path / "recipe.toml").write_text(
        '[data]\nfiles = ["~nobody-here/x", "pri*"]\ntokenizer = "../private"\n[run]\nname = "x"\n'
    )
    monkeypatch.chdir(tmp_path)
    found = read_saved_recipe(tmp_path / "recipe.toml").data
    assert (found.files, found.tokenizer) == (("~nobody-here/x", "pri*"), "../private")
