"""`plait new`: writes a commented recipe for the texts in the current folder, to begin with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from plait.data.folders import RECORD_SUFFIXES, TEXT_SUFFIXES
from plait.data.sources import Source, open_source
from plait.errors import PlaitError
from plait.recipe.load import parse_config, run_name_of
from plait.recipe.values import LONGEST_NAME
from plait.report.atomic import cannot_write

SAMPLE_TEXT = "shakespeare.txt"
"""Among the package's examples; where a folder holds no text, it is put there."""
_TEMPLATE = """\
# Look at the plan:  plait plan {name}.toml
# Train it:          plait train {name}.toml
# Let it write:      plait sample {name}
#
# Only `files` is required. plait chooses all else and says why. Lines that begin with # are examples and not in
# force; take the # away, and change the value, to choose yourself.

[run]
name = "{name}"
# seed = 7                     # another seed, another run

[data]
files = {files}
# files = ["a.txt", "more/*.jsonl", "hf:NAME"]    # several: text, Markdown, JSONL, Parquet, sets of Hugging Face
# files = [{{ path = "b.jsonl", field = "lyrics" }}]  # JSONL and Parquet: the column that holds the text
# tokenizer = "gpt2"           # "bpe" learns one from your text; or a tokenizer.json

[train]
budget = "5 minutes"           # or "2 hours", "500 steps", "20M tokens"
# sequence = 256               # tokens of a sequence: how far back the model can look
# batch_tokens = 4096          # tokens of a step

[optimizer]
# lr = 1e-3                    # the learning rate at its peak

[model]
# size = "5M"                  # parameters: "1M", "5M", "25M", "125M", "1B" …

[layout]
# replicate = 2                # two workers that share each batch; a plan says what is fastest here
"""


def write_recipe(name: str, texts: Sequence[str]) -> list[str]:
    """Write NAME.toml into the current folder; returns what was written, as lines for people.

    Without `texts` the recipe reads all texts that lie in the folder. Where there are none, a sample text is put there.
    Raises PlaitError, and writes nothing, for a name or a text that cannot be used and for a recipe that is there.
    """
    name = name.removesuffix(".toml")
    _check_name(name)
    recipe = Path(f"{name}.toml")
    if recipe.exists() or recipe.is_symlink():
        raise PlaitError(f"{recipe} is here already; choose another name, or remove it first")
    chosen = list(texts) or texts_here(Path())
    for text in chosen:
        if not text.startswith("hf:"):
            open_source(Source(text, given_as="--text"))
    lines = [] if chosen else [_put_sample_text()]
    _write_new(recipe, new_recipe_text(name, chosen or [SAMPLE_TEXT]).encode())
    return [*lines, f"wrote    {recipe}, a recipe with comments", f"next     plait plan {recipe}, plait train {recipe}"]


def _check_name(name: str) -> None:
    try:
        parse_config({"run": {"name": name}, "data": {"files": SAMPLE_TEXT}})
    except PlaitError:
        raise PlaitError(
            f'"{name}" is not a name; choose small letters, digits, ".", "_" and "-", at most {LONGEST_NAME}, for '
            f"example {run_name_of(Path(f'{name}.toml'))}"
        ) from None


def texts_here(folder: Path) -> list[str]:
    """What a recipe beside a folder's texts names: the one text that is there, or a pattern for each kind of them."""
    kinds = (*TEXT_SUFFIXES, *RECORD_SUFFIXES)
    found = {kind: sorted(path.name for path in folder.glob(f"[!.]*{kind}") if path.is_file()) for kind in kinds}
    found = {kind: names for kind, names in found.items() if names}
    return [names[0] if len(names) == 1 else f"*{kind}" for kind, names in found.items()]


def new_recipe_text(name: str, texts: Sequence[str]) -> str:
    """The recipe of a new run, with comments on what most people change first."""
    named = [json.dumps(text, ensure_ascii=False) for text in texts]  # a JSON text is a TOML text, too
    return _TEMPLATE.format(name=name, files=named[0] if len(named) == 1 else f"[{', '.join(named)}]")


def _put_sample_text() -> str:
    _write_new(Path(SAMPLE_TEXT), files("plait").joinpath("examples", SAMPLE_TEXT).read_bytes())
    return f"wrote    {SAMPLE_TEXT}, because no text was here: Shakespeare, 5 MB"


def _write_new(path: Path, data: bytes) -> None:
    """Write a file that is not there yet; whatever is there by now stays as it is."""
    try:
        with path.open("xb") as file:
            file.write(data)
    except FileExistsError:
        raise PlaitError(f"{path} is here already; choose another name, or remove it first") from None
    except OSError as error:
        raise cannot_write(path, error, PlaitError) from None
