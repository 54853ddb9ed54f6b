"""`plait new`: writes a commented recipe for the texts in the current folder, to begin with."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal, get_args

from plait.checked_json import one_line
from plait.data.conversations.formats import both_texts_and_chats, source_format, text_column
from plait.data.documents import column_names
from plait.data.file_faults import (
    FileFault,
    beginning_fault,
    error_fault,
    kind_fault,
    read_content,
    shown_path,
    typed_path,
)
from plait.data.folders import RECORD_SUFFIXES, TEXT_SUFFIXES
from plait.data.sources import Source, open_source, open_sources
from plait.errors import PlaitError
from plait.recipe.load import parse_config, run_name_of
from plait.recipe.values import LONGEST_NAME
from plait.report.atomic import cannot_write
from plait.units import counted, format_bytes

SAMPLE_TEXT = "shakespeare.txt"
"""Among the package's examples; where a folder holds no text, it is put there."""
_TEMPLATE = """\
# Prepare the text:  plait data {name}.toml
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
# files = ["a.txt", "more/*.jsonl", "hf:NAME"]    # several: text, Markdown, CSV, JSONL, Parquet, sets of Hugging Face
# files = [{{ path = "b.csv", field = "lyrics" }}]    # CSV, JSONL and Parquet: the column that holds the text
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
    """Write NAME.toml into the current folder; returns what was read, left out and written, as lines for people.

    Without `texts` the recipe names the texts that lie in the folder. Where there are none, a sample text is put there.
    Raises PlaitError, and writes nothing, for a name or a text that cannot be used and for a recipe that is there.
    """
    name = name.removesuffix(".toml")
    _check_name(name)
    recipe = Path(f"{name}.toml")
    if recipe.exists() or recipe.is_symlink():
        raise PlaitError(f"{recipe} is here already; choose another name, or remove it first")
    found = texts_named(texts) if texts else texts_here()
    lines = found.lines() if found.texts or found.left_out else [_put_sample_text()]
    chosen = found.texts or (RecipeText(SAMPLE_TEXT),)
    _write_new(recipe, new_recipe_text(name, chosen).encode())
    later = [f'later    to add or convert a file: name it under "files" in {recipe}'] if found.left_out else []
    return [
        *lines,
        f"wrote    {recipe}, a recipe with comments",
        *later,
        f"next     plait data {recipe}   prepares the text and shows what is read",
        f"         plait plan {recipe}   shows the model, the time and the memory",
        f"         plait train {recipe}  trains it",
    ]


def _check_name(name: str) -> None:
    try:
        parse_config({"run": {"name": name}, "data": {"files": SAMPLE_TEXT}})
    except PlaitError:
        raise PlaitError(
            f'"{name}" is not a name; choose small letters, digits, ".", "_" and "-", at most {LONGEST_NAME}, for '
            f"example {run_name_of(Path(f'{name}.toml'))}"
        ) from None


Content = Literal["text", "examples"]
"""Text that is read from end to end, or examples that are kept whole."""


@dataclass(frozen=True, slots=True)
class RecipeText:
    """What a recipe reads: a file, or whatever else `data.files` may name, and the column that holds its text."""

    path: str
    field: str = ""
    content: Content = "text"
    nbytes: int = 0

    @property
    def value(self) -> str:
        """The value as the recipe has it."""
        path = json.dumps(self.path, ensure_ascii=False)  # a JSON text is a TOML text, too
        return f"{{ path = {path}, field = {json.dumps(self.field, ensure_ascii=False)} }}" if self.field else path

    def __str__(self) -> str:
        is_pattern = self.path.startswith("*")
        more = f', column "{self.field}"' if self.field else ", and what is put here later" if is_pattern else ""
        path = one_line(self.path)
        return f"{path} ({format_bytes(self.nbytes)}{more})" if self.nbytes else path


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTexts:
    """The texts that a recipe will name, and what lies beside them."""

    texts: tuple[RecipeText, ...]
    left_out: tuple[FileFault, ...]
    not_looked_at: str = ""
    """How many files of other types lie there, by type."""

    def lines(self) -> list[str]:
        """What is read and what is not, for people."""
        shown = [str(text) for text in self.texts[:_SHOWN]]
        more = f" and {len(self.texts) - _SHOWN} more" if len(self.texts) > _SHOWN else ""
        others = [line for fault in self.left_out[:_SHOWN] for line in fault.lines()]
        if len(self.left_out) > _SHOWN:
            others.append(f"left out {len(self.left_out) - _SHOWN} more, for reasons like these")
        others += [f"         not looked at: {self.not_looked_at}"] if self.not_looked_at else []
        return [f"reads    {', '.join(shown)}{more}", *others]


_SHOWN = 6
"""How many files are listed by name: of those that are read, and again of those that are left out."""
_READ_WHOLE_BYTES = 1 << 25
"""Above this total only the beginnings of files are read; `plait data` reads all of them."""
_MOST_NAMES = 1000
"""Above this number of files the recipe has a pattern for each kind."""


def texts_here() -> FoundTexts:
    """The texts in the current folder, each by its name: what is put there later is not read. Raises PlaitError where
    there are only files that cannot be learned from."""
    known = (*TEXT_SUFFIXES, *RECORD_SUFFIXES, ".pdf")
    entries = [path for path in sorted(Path().iterdir()) if not path.name.startswith(".")]
    there = [path for path in entries if path.is_file()]
    others = Counter(path.suffix.lower() for path in there if path.suffix.lower() not in (*known, ".toml"))
    looked_into = [path for path in entries if path.is_dir() or (path.is_file() and path.suffix.lower() in known)]
    left_out = [fault for path in looked_into if (fault := _name_fault(path))]
    unnamed = {fault.file for fault in left_out}
    files = [path for path in looked_into if path not in unnamed and not path.is_dir()]
    read = _read_of(files)
    looked = [_looked_at(file, file.name, read) for file in files]
    texts = [one for one in looked if isinstance(one, RecipeText)]
    left_out += [one for one in looked if isinstance(one, FileFault)]
    if left_out and not texts:
        reasons = "; ".join(map(str, left_out[:_SHOWN]))
        raise PlaitError(f"no file here can be used: {reasons}; put a .txt here, or name one with --text")
    sizes = {kind: sum(text.nbytes for text in texts if text.content == kind) for kind in get_args(Content)}
    main = max(sizes, key=lambda kind: sizes[kind])
    what = "chats or prompts with answers" if main == "text" else "plain text"
    left_out += [
        FileFault(
            file=Path(text.path),
            what=f"holds {what}",
            advice="a recipe of its own learns them",
            command=shlex.join(["plait", "new", "NAME", "--text", typed_path(Path(text.path))]),
        )
        for text in texts
        if text.content != main
    ]
    left_out += [
        FileFault(
            file=path,
            what=f"is a folder with {counted(number, 'text file')}",
            advice=f"add {json.dumps(path.name, ensure_ascii=False)} to files to read it too",
        )
        for path in entries
        if path.is_dir()
        and path not in unnamed
        and (number := sum(one.suffix.lower() in known for one in _entries(path)))
    ]
    return FoundTexts(
        texts=_few_names([text for text in texts if text.content == main]),
        left_out=tuple(left_out),
        not_looked_at=", ".join(
            f"{number} {shown_path(Path(suffix[:12])) if suffix else 'without a suffix'}"
            for suffix, number in sorted(others.items())
        ),
    )


def _name_fault(path: Path) -> FileFault | None:
    """Why a file or folder is not looked into, whatever is in it: a name that no recipe can hold, or a link that may
    lead to what is not meant to be learned."""
    try:
        path.name.encode()
    except UnicodeEncodeError:
        return FileFault(file=path, what="has a name that is not UTF-8", advice="rename it")
    if path.is_symlink() and not path.resolve().is_relative_to(Path.cwd().resolve()):
        return FileFault(file=path, what="is a link out of this folder", advice="name it with --text if you want it")
    return None


Reading = Literal["all", "beginning"]


def _read_of(files: Sequence[Path]) -> Reading:
    """How much of each file is read to find out whether it can be used."""
    return "all" if sum(file.stat().st_size for file in files) <= _READ_WHOLE_BYTES else "beginning"


def _few_names(texts: Sequence[RecipeText]) -> tuple[RecipeText, ...]:
    """Each text by name; a pattern for each type where there are very many, except for tables with a named column."""
    if len(texts) <= _MOST_NAMES:
        return tuple(texts)
    sizes: dict[str, int] = {}
    for text in texts:
        path = text.path if text.field else f"*{Path(text.path).suffix}"
        sizes[path] = sizes.get(path, 0) + text.nbytes
    named = {text.path: text for text in texts if text.field}
    return tuple(named.get(path) or RecipeText(path, nbytes=nbytes) for path, nbytes in sizes.items())


def texts_named(texts: Sequence[str]) -> FoundTexts:
    """The texts that a person names; raises PlaitError for one that is not there, and where none can be used."""
    sources = [Source(text, given_as="--text") for text in texts]
    local = [source for source in sources if not source.path.startswith("hf:")]
    if local:
        open_sources(local)
    read = _read_of([Path(source.path) for source in local if Path(source.path).is_file()])
    looked = [
        _looked_at(Path(source.path), source.path, read) if Path(source.path).is_file() else RecipeText(source.path)
        for source in sources
    ]
    faults = [one for one in looked if isinstance(one, FileFault)]
    found = tuple(one for one in looked if isinstance(one, RecipeText))
    if faults and not found:
        raise faults[0].error("take it out of --text")
    return FoundTexts(texts=found, left_out=tuple(faults))


def _looked_at(file: Path, path: str, read: Reading) -> RecipeText | FileFault:
    """The file as a recipe names it, with the column of its text where that is not called so; or why it cannot be
    learned from."""
    if fault := kind_fault(file) or (read_content(file).fault_of(file) if read == "all" else beginning_fault(file)):
        return fault
    size = file.stat().st_size
    if file.suffix.lower() in TEXT_SUFFIXES:
        return RecipeText(path, nbytes=size)
    try:
        opened = open_source(Source(path))
        if chats := both_texts_and_chats(opened):
            return FileFault(
                file=file,
                what=f'holds texts ("text") and chats ("{chats}")',
                advice='choose data.format = "text" or "chat" in a recipe that reads only this file',
            )
        form = source_format(opened, "auto")
        if form.kind == "preference":
            return FileFault(
                file=file,
                what="holds preference pairs",
                advice='tune a trained model with them (finetune.objective = "dpo", "orpo" or "simpo")',
            )
        if form.kind != "text":
            return RecipeText(path, content="examples", nbytes=size)
        first = next(opened.records(), None)
        if first and isinstance(first.values.get("text"), str):
            return RecipeText(path, nbytes=size)
        if field := text_column(opened):
            return RecipeText(path, field=field, nbytes=size)
    except PlaitError as error:
        return error_fault(file, error)
    columns = column_names(list(first.values)) if first and first.values else "none"
    return FileFault(file=file, what=f"has no column of text (its columns: {columns})")


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # one that this user may not look into
        return []


def new_recipe_text(name: str, texts: Sequence[RecipeText]) -> str:
    """The recipe of a new run, with comments on what most people change first."""
    values = [text.value for text in texts]
    line = f"[{', '.join(values)}]"
    if len(texts) == 1 and not texts[0].field:
        line = values[0]
    elif len(line) > _LONGEST_LINE:
        line = "".join(["[\n", *(f"    {value},\n" for value in values), "]"])
    return _TEMPLATE.format(name=name, files=line)


_LONGEST_LINE = 100


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
