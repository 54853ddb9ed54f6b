"""`plait data`: text to tokens on disk, once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from plait.checked_json import one_line, printable
from plait.commands.preparing.base import base_facts, base_folder
from plait.data.choices import read_questions
from plait.data.conversations.chat_template import PLAIN_NAME
from plait.data.file_faults import FileFault, shown_path
from plait.data.folders import find_text_files
from plait.data.index import INDEX_FILE
from plait.data.integrity import verify_at_start
from plait.data.order import longest_window
from plait.data.preparation.build import DataRequest
from plait.data.preparation.prepare import find_prepared, prepare_corpus
from plait.data.preparation.tokens import corpus_tokenizer
from plait.data.samples.sizes import Overlong, corpus_sizes
from plait.data.shards import Corpus, open_corpus
from plait.data.sources import Source
from plait.errors import PlaitError
from plait.planner.derive.model_size import CorpusFacts
from plait.recipe.schema import RunConfig
from plait.screen.screen import Screen
from plait.units import counted
from plait.working_folder import WorkingFolder

_LEFT_OUT_FILES = 6
_NAMED_FILES = 12
"""How many of the files that were left out are printed with their reason, and how many more by name alone."""
_NAMED_SOURCES = 4
"""Sources whose held-out share is printed by name."""
_LOST = {"system": "the system message", "user": "what the user says", "assistant": "what the assistant says"}
_LOST |= {"tool": "results of tools", "reasoning": "some reasoning"}


def prepared_corpus(config: RunConfig, working: WorkingFolder, screen: Screen) -> Corpus:
    """Prepare the recipe's data, or find it prepared; raises PlaitError in one sentence, also for a model to go on from
    that cannot be used."""
    check_choices(config)
    with screen.progress() as show:
        if config.model.from_ is not None:  # the first time a .gguf file is converted, or a model fetched
            show(0, 0, f"reading {printable(Path(config.model.from_).name)}")
        base_facts(config, working)  # before minutes go into its tokens
    for line in working.warnings():
        screen.print(line)
    request = data_request(config, base_folder(config, working))
    for source in request.sources:
        if Path(source.path).is_dir():
            screen.print(f"data     {find_text_files(Path(source.path)).summary()}")

    left_out = tuple[str, ...]()

    def say_left_out(faults: Sequence[FileFault]) -> None:
        nonlocal left_out
        left_out = tuple(map(str, faults))
        for line in unread_file_lines(faults):
            screen.print(line)

    with screen.progress() as show:
        folder = prepare_corpus(request, working.cache, show, say_left_out)
        corpus = replace(open_corpus(folder), left_out=left_out)
        show(0, 0, "comparing hashes")
        verify_at_start(corpus)
    if corpus.layout == "pairs" and not config.finetune.learns_pairs:
        raise PlaitError(
            'data.files hold pairs of answers (chosen, rejected), which finetune.objective = "dpo", "orpo" or "simpo" '
            "learns from; write one of them in [finetune], or name other files"
        )
    for line in (*example_lines(corpus, config.data.bad_records), *_token_lines(corpus)):
        screen.print(line)
    return corpus


def unread_file_lines(faults: Sequence[FileFault]) -> list[str]:
    """Which files were not read and why, for the first ones; the others by name."""
    lines = [line for fault in faults[:_LEFT_OUT_FILES] for line in fault.lines()]
    if further := [fault.file.name for fault in faults[_LEFT_OUT_FILES:]]:
        more = f" and {counted(len(further) - _NAMED_FILES, 'more file')}" if len(further) > _NAMED_FILES else ""
        lines.append(f"left out also {', '.join(further[:_NAMED_FILES])}{more}")
    return lines


def heldout_lines(corpus: Corpus) -> list[str]:
    """What each of several sources holds out, in one line; none for one source, or in a corpus of an earlier
    version."""
    shares = [
        (source.heldout_bytes / source.text_bytes, shown_path(Path(source.path)))
        for source in corpus.sources
        if source.heldout_bytes is not None and source.text_bytes
    ]
    if len(shares) < max(2, len(corpus.sources)) or not corpus.heldout_bytes:
        return []
    if len(shares) <= _NAMED_SOURCES:
        return ["held out " + ", ".join(f"{share:.2%} of {path}" for share, path in shares)]
    (least, least_path), (most, most_path) = min(shares), max(shares)
    return [
        f"held out {least:.2%} ({least_path}) to {most:.2%} ({most_path}) of each of {len(shares)} sources, listed in "
        f"{corpus.folder / INDEX_FILE}"
    ]


def example_lines(corpus: Corpus, bad_records: float) -> list[str]:
    """Where the chat template comes from, how many records were skipped and why, and what the template changes; a line
    each. Nothing for a corpus without chats that skipped none."""
    counts, lines = corpus.counts, list[str]()
    if corpus.template:
        lines.append(f"template {_template_text(corpus)}")
    if counts.skipped:
        lines.append(
            f"skipped  {counts.skipped:,} of {counted(counts.records, 'record', ',')}, as data.bad_records = "
            f"{bad_records:g} allows: {'; '.join(map(one_line, counts.first_skipped))}"
            f"{'; …' if counts.skipped > len(counts.first_skipped) else ''}"
        )
    many = f"of {counted(counts.chats, 'chat', ',')}"
    if number := counts.remarks.get("last answers"):
        lines.append(f"learned  in {number:,} {many} only the last answers: the template changes earlier ones")
    if number := counts.remarks.get("other prompt"):
        lines.append(
            f"learned  in {number:,} {many} an answer after other text than the template has a model go on from; "
            "another data.chat_template may not"
        )
    lost = {key.removeprefix("lost "): number for key, number in counts.remarks.items() if key.startswith("lost ")}
    if lost:
        parts = ", ".join(f"{_LOST.get(kind, kind)} in {number:,}" for kind, number in sorted(lost.items()))
        lines.append(
            f"left out {many} the template leaves out {parts}: the model neither reads nor learns it; another "
            "data.chat_template may keep it"
        )
    return lines


def _token_lines(corpus: Corpus) -> list[str]:
    """The token that texts begin with, if it is not the end of text, and how often a cut or a prompt's end may have
    changed tokens."""
    lines = []
    if corpus.bos:
        chats = "; chats begin as their template begins them" if corpus.template else ""
        text = corpus_tokenizer(corpus).bos_text
        lines.append(
            f"tokens   each document and each prompt begins with {text}, as this model's tokenizer does{chats}"
        )
    if corpus.boundary_tokens and corpus.layout == "stream":
        lines.append(
            f"tokens   {counted(corpus.boundary_tokens, 'place', ',')} in text without spaces had to be cut where a "
            "token may lie; tokens there may differ from an uncut encoding"
        )
    elif corpus.boundary_tokens:
        number = counted(corpus.boundary_tokens, "completion", ",")
        lines.append(
            f"tokens   the first characters of {number} share a token with the end of the prompt, so they are read and "
            "not learned; end prompts without a space and begin completions with it"
        )
    return lines


def learnt_facts(config: RunConfig, corpus: Corpus) -> CorpusFacts:
    """The facts as a person reads them: with a window named in the recipe, without the examples that do not fit."""
    facts, sequence = corpus_facts(corpus), config.train.sequence
    if facts.sizes is None or sequence == "auto" or config.data.overlong == "refuse":
        return facts
    packed = facts.sizes.packed(sequence, config.data.overlong)
    return replace(facts, documents=packed.examples, train_tokens=packed.tokens)


def overlong_lines(facts: CorpusFacts, sequence: int, overlong: Overlong) -> list[str]:
    """How many examples do not fit into a window, and what becomes of them; nothing where all fit."""
    packed = facts.sizes.packed(sequence, overlong) if facts.sizes and facts.sizes.examples else None
    if packed is None or not packed.overlong:
        return []
    unit = packed.unit
    longer = f"{counted(packed.overlong, unit, ',')} of more than {sequence} tokens"
    fate = {"refuse": "refused", "drop": "left out", "cut": "cut at a window's end"}[overlong]
    return [f"overlong {longer}: {fate} (data.overlong); {counted(packed.examples, unit, ',')} learned from"]


def _template_text(corpus: Corpus) -> str:
    if corpus.template != PLAIN_NAME:
        return f"of chats: {corpus.template}"
    return f'of chats: {PLAIN_NAME}, as the tokenizer has none ("User:" and "Assistant:", each on a line of its own)'


def check_choices(config: RunConfig) -> None:
    """Raise PlaitError where the recipe's multiple-choice questions cannot be asked."""
    if not config.report.choices:
        return
    read_questions(Path(config.report.choices))
    if not config.data.holdout:
        raise PlaitError("report.choices are asked when the held-out loss is measured; give data.holdout, such as 0.01")


def find_prepared_corpus(config: RunConfig, working: WorkingFolder) -> Corpus | None:
    """The recipe's data if it was prepared before; looks at nothing but files' sizes and times."""
    folder = find_prepared(data_request(config, base_folder(config, working)), working.cache)
    return open_corpus(folder) if folder else None


def data_request(config: RunConfig, base: Path | None = None) -> DataRequest:
    """The recipe's [data] section as a request for a corpus; `base` is the folder of the model that learns from it,
    whose tokenizer is taken where none is named."""
    files = config.data.files
    requested = [files] if isinstance(files, str) else files
    sources = [
        Source(path=one) if isinstance(one, str) else Source(path=one.path, weight=one.weight, field=one.field)
        for one in requested
    ]
    vocabulary = config.model.vocabulary
    tokenizer = config.data.tokenizer
    return DataRequest(
        sources=tuple(sources),
        tokenizer=_usual_tokenizer(base) if tokenizer == "auto" else tokenizer,
        vocabulary=None if vocabulary == "auto" else vocabulary,
        holdout=config.data.holdout,
        format="preference" if config.finetune.learns_pairs else config.data.format,
        template_folders=(base,) if base else (),
        chat_template=config.data.chat_template,
        bad_records=config.data.bad_records,
    )


def _usual_tokenizer(base: Path | None) -> str:
    if base is None:
        return "bpe"
    if not (base / "tokenizer.json").is_file():
        raise PlaitError(
            f"{base} has no tokenizer.json; name the model's tokenizer in data.tokenizer, or convert it: load it with "
            "transformers' AutoTokenizer and call save_pretrained"
        )
    return str(base)


def run_facts(config: RunConfig, corpus: Corpus, working: WorkingFolder) -> CorpusFacts:
    """The facts about the data, and about the model that the recipe goes on from, that a plan depends on."""
    facts, base = corpus_facts(corpus), base_facts(config, working)
    if base is not None and facts.vocabulary > base.shape.vocabulary:
        facts = replace(facts, added_tokens=corpus_tokenizer(corpus).added_entries)
    return replace(facts, base=base)


def corpus_facts(corpus: Corpus) -> CorpusFacts:
    """The facts about the data that a plan depends on."""
    return CorpusFacts(
        folder=str(corpus.folder),
        content_hash=corpus.content_hash,
        vocabulary=corpus.vocabulary,
        train_tokens=corpus.train_tokens,
        longest_sequence=longest_window(corpus),
        layout=corpus.layout,
        sizes=corpus_sizes(corpus),
        heldout_tokens=corpus.heldout_tokens,
        documents=sum(len(shard.starts) for shard in corpus.train) // (2 if corpus.layout == "pairs" else 1),
    )
