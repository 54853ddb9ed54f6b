"""plait from Python: the functions that use a model which a run, or somebody else, has trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from plait.arguments import check_arguments, texts_of
from plait.commands.python_call import as_command, known_keywords, screen_for
from plait.errors import PlaitError
from plait.working_folder import Place, named_folder

if TYPE_CHECKING:
    from plait.commands.answering.chat import Conversation
    from plait.commands.evaluate import Evaluation
    from plait.commands.sample import SampledText


@known_keywords
def sample(
    run: str | Path,
    prompt: str = "",
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 1,
    adapter: str | Path | None = None,
    folder: Place = None,
) -> SampledText:
    """The prompt and the model's continuation, piece by piece, or whole as a `str`; the same seed, the same text.

    `adapter` is another one than the run's own: a run, a folder of PEFT's, or "none".
    """
    check_arguments(run=run, prompt=prompt, tokens=tokens, temperature=temperature, top_p=top_p, seed=seed)
    check_arguments(adapter=adapter)
    from plait.commands.sample import sample as go_on

    options: dict[str, Any] = {"tokens": tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    with as_command():
        other = None if adapter is None else str(adapter)
        return go_on(str(run), prompt, **options, adapter=other, working=named_folder(folder))


@known_keywords
def evaluate(
    run: str | Path,
    files: str | Path | Sequence[str | Path] = (),
    *,
    sequence: int | None = None,
    choices: str | Path | None = None,
    heldout_of: str | Path | None = None,
    adapter: str | Path | None = None,
    field: str | None = None,
    folder: Place = None,
) -> Evaluation:
    """The exact loss of a run, or of a model's folder, on its held-out text, on other files or on what another run held
    out, in windows of `sequence` tokens; or its answers to the multiple-choice questions of a JSON-lines file: the keys
    that `plait eval` prints.

    `adapter` is another one than the run's own: a run, a folder of PEFT's, or "none". `field` is the column of the
    files' text.
    """
    check_arguments(run=run, sequence=sequence, choices=choices, heldout_of=heldout_of, adapter=adapter, field=field)
    options: dict[str, Any] = {"sequence": sequence, "adapter": None if adapter is None else str(adapter)}
    paths = texts_of("files", files)
    from plait.commands.answering.choices import ask_choices
    from plait.commands.evaluate import evaluate as measure
    from plait.commands.evaluate import texts_of_field

    with as_command():
        screen, working = screen_for("off"), named_folder(folder)
        if choices is None:
            other = None if heldout_of is None else str(heldout_of)
            options |= {"heldout_of": other, "given_as": "files"}
            texts = texts_of_field(paths, field, given_as="files")
            return measure(str(run), texts, **options, screen=screen, working=working)
        if paths or heldout_of:
            raise PlaitError("choices and a text are measured one at a time; leave one of them out")
        return ask_choices(str(run), Path(choices), **options, screen=screen, working=working)


@known_keywords
def chat(
    run: str | Path,
    *,
    tokens: int = 512,
    temperature: float = 0.7,
    top_p: float = 0.95,
    seed: int = 1,
    adapters: str | Path | Sequence[str | Path] = (),
    folder: Place = None,
) -> Conversation:
    """A conversation with the model of a run or of a folder, by its chat template: `say` gives its answers. It begins
    with the first of `adapters`, and `take_adapter` takes another one."""
    check_arguments(run=run, tokens=tokens, temperature=temperature, top_p=top_p, seed=seed)
    names = texts_of("adapters", adapters)
    from plait.commands.answering.chat import AnswerSettings, open_chat

    settings = AnswerSettings(tokens=tokens, temperature=temperature, top_p=top_p, seed=seed)
    with as_command():
        return open_chat(str(run), settings, adapters=names, working=named_folder(folder))


@known_keywords
def export(
    run: str | Path,
    to: str | Path,
    *,
    dtype: str = "float32",
    what: Literal["model", "adapter", "merged"] = "model",
    folder: Place = None,
) -> Path:
    """Write the run's model as the new folder `to`, which transformers and others load, or its adapter alone as PEFT's
    files; returns that folder. Of a run of adapters the model is the merged one. A name that ends with .gguf becomes
    one file for llama.cpp."""
    check_arguments(run=run, to=to, dtype=dtype, what=what)
    from plait.commands.export import write_export

    with as_command():
        return write_export(
            str(run), Path(to), dtype=dtype, what=what, screen=screen_for("off"), working=named_folder(folder)
        )
