"""Texts begin as transformers begins them: with the BOS that the tokenizer adds, whatever ends a text."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

from plait.commands.evaluate import evaluate
from plait.commands.sample import sample
from plait.data.choices import ChoiceQuestion, choice_rows
from plait.data.loader import IGNORED_TARGET, Loader, SampleSelection, heldout_micros
from plait.data.preparation.build import DataRequest
from plait.data.preparation.prepare import prepare_corpus
from plait.data.preparation.tokens import corpus_tokenizer, load_tokenizer
from plait.data.samples.opening import training_samples
from plait.data.shards import Corpus, open_corpus
from plait.data.sources import Source
from plait.model.gpt import GPT
from plait.screen.screen import SilentScreen
from plait.working_folder import WorkingFolder
from tests.interop.test_interop_families import in_float64, in_float64_here
from tests.interop.tokenizer_folders import KINDS, SHAKESPEARE, Kind, build_tokenizer, ends_of, write_model
from tests.matrix import few_fast

TEXTS = ["The king is here.", "Who's there?\nNay, answer me: stand.", " unfold yourself", "Long live the king!"]
RECORDS: dict[str, list[dict[str, str]]] = {
    "text": [{"text": text} for text in TEXTS],
    "prompt-completion": [
        {"prompt": "12+30=", "completion": "42"},
        {"prompt": "Who is there?\n", "completion": "Nay, answer me."},
        {"prompt": "The king", "completion": " is here."},
    ],
    "preference": [
        {"prompt": "The king is", "chosen": " here.", "rejected": " there, I say."},
        {"prompt": "1+1=", "chosen": "2", "rejected": "three"},
    ],
}


def corpus_of(folder: Path, records: list[dict[str, str]], tokenizer: Path, *, shard_tokens: int = 2**20) -> Corpus:
    file = folder / "records.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in records))
    request = DataRequest(sources=(Source(str(file)),), tokenizer=str(tokenizer), vocabulary=None, holdout=0.0)
    return open_corpus(prepare_corpus(request, folder / "cache", lambda *_: None, shard_tokens=shard_tokens))


def selection(sequence: int) -> SampleSelection:
    return SampleSelection(
        sequence=sequence,
        sequences_per_replica=(1,),
        data_parallel_rank=0,
        lockstep_replicas=range(1),
        micro_sequences=1,
        documents="mask",
        device=torch.device("cpu"),
    )


def loss_here(model: GPT, corpus: Corpus) -> tuple[float, int]:
    """Summed loss of all that is learned in the training part, and its number of tokens."""
    total, count = 0.0, 0
    for micro in heldout_micros(replace(corpus, train=(), heldout=corpus.train), selection(model.shape.sequence)):
        assert micro.lengths is not None
        segments = (each.flatten().split(micro.lengths) for each in (micro.inputs, micro.targets))
        for ids, wanted in zip(*segments, strict=True):
            if bool((wanted != IGNORED_TARGET).any()):
                total += cross_entropy(model.logits(model(ids[None])), wanted, reduction="sum").item()
                count += int((wanted != IGNORED_TARGET).sum())
    return total, count


def loss_there(theirs: Any, ids: list[int], known: int) -> tuple[float, int]:
    """transformers' summed loss of all tokens behind the first `known`."""
    with torch.no_grad():
        scores = theirs(torch.tensor([ids])).logits[0, known - 1 : -1]
    return cross_entropy(scores, torch.tensor(ids[known:]), reduction="sum").item(), len(ids) - known


def references(form: str, folder: Path) -> list[tuple[list[int], int]]:
    """For each example the ids as transformers and TRL make them, the end of text behind them, and how many of them are
    only read."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    end = [tokenizer.eos_token_id]
    if form == "text":
        return [(tokenizer(one["text"]).input_ids + end, 1) for one in RECORDS[form]]
    answers = ("chosen", "rejected") if form == "preference" else ("completion",)
    return [
        (tokenizer(one["prompt"] + one[answer]).input_ids + end, len(tokenizer(one["prompt"]).input_ids))
        for one in RECORDS[form]
        for answer in answers
    ]


@pytest.mark.parametrize("form", few_fast(["text", "prompt-completion"], "prompt-completion"))
@pytest.mark.parametrize("kind", ["metaspace", "prepend", "llama 3"])
def test_the_loss_is_transformers_behind_its_own_beginning(kind: Kind, form: str, tmp_path: Path) -> None:
    theirs = write_model(tmp_path / "base", kind)
    corpus = corpus_of(tmp_path, RECORDS[form], tmp_path / "base")
    found, count = loss_here(in_float64_here(tmp_path / "base", sequence=128), corpus)
    in_float64(theirs)
    expected = [loss_there(theirs, ids, known) for ids, known in references(form, tmp_path / "base")]
    assert count == sum(number for _, number in expected)
    assert found == pytest.approx(sum(total for total, _ in expected), rel=1e-9)


@pytest.mark.parametrize("kind", few_fast(["metaspace", "llama 3"], "llama 3"))
def test_plait_eval_and_sample_begin_as_transformers_does(kind: Kind, tmp_path: Path) -> None:
    theirs: Any = write_model(tmp_path / "base", kind)
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(one) + "\n" for one in RECORDS["text"]))
    working = WorkingFolder(tmp_path)
    measured = evaluate("base", [str(tmp_path / "t.jsonl")], screen=SilentScreen(), working=working)
    expected = [loss_there(theirs, ids, known) for ids, known in references("text", tmp_path / "base")]
    count, nbytes = sum(number for _, number in expected), sum(len(text.encode()) for text in TEXTS)
    assert (measured["tokens"], measured["bytes"]) == (count, nbytes)
    total = sum(loss for loss, _ in expected)
    assert measured["eval_loss"] == pytest.approx(total / count, rel=1e-5)
    assert measured["eval_nats_per_byte"] == pytest.approx(total / nbytes, rel=1e-5)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "base")
    compared = 0
    for prompt in SHAKESPEARE[:800].split("\n"):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        (answer,) = theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=2)
        wanted = tokenizer.decode(answer[1:])
        if tokenizer.eos_token_id in answer.tolist() or "\ufffd" in wanted:
            continue  # pieces of bytes that are no characters are shown in another way than as a whole
        compared += 1
        said = str(sample("base", prompt, tokens=2, temperature=0.0, top_p=1.0, seed=1, working=working))
        assert said.strip() == wanted.strip()
    assert compared >= 4


@pytest.mark.parametrize("kind", few_fast(KINDS, "metaspace", "unigram", "llama 3"))
def test_the_tokens_are_those_that_transformers_learns_from(kind: Kind, tmp_path: Path) -> None:
    write_model(tmp_path / "base", kind)
    for form in RECORDS:
        if kind in ("llama 3", "bytes") and form != "text":
            continue  # they give a completion no prefix, and keep its tokens apart from the prompt's
        (tmp_path / form).mkdir()
        corpus = corpus_of(tmp_path / form, RECORDS[form], tmp_path / "base")
        (shard,) = corpus.train
        assert shard.mask is not None
        end = len(shard.tokens) - (0 if form == "text" else 1)
        bounds = [*shard.starts.tolist(), end]
        found = [
            (shard.tokens[first:last].tolist(), shard.mask[first:last].tolist()) for first, last in pairwise(bounds)
        ]
        wanted = references(form, tmp_path / "base")
        assert found == [(ids, [1] * known + [0] * (len(ids) - known)) for ids, known in wanted]
        assert corpus.boundary_tokens == 0


def test_choices_stand_behind_the_beginning(tmp_path: Path) -> None:
    write_model(tmp_path / "base", "metaspace")
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "base")
    question = ChoiceQuestion(text="The king is", choices=("here.", "there."), answer=0)
    rows = choice_rows([question], load_tokenizer(tmp_path / "base"), 64)
    assert [list(row.tokens) for row in rows] == [tokenizer(f"The king is {one}").input_ids for one in question.choices]
    assert all(row.first == len(tokenizer("The king is").input_ids) for row in rows)


@pytest.mark.parametrize("post", ["none", "bos", "bytes", "bytes and bos"])
@pytest.mark.parametrize("own_class", ["PreTrainedTokenizerFast", "LlamaTokenizerFast", "GPTNeoXTokenizer", None])
def test_what_is_added_is_what_transformers_adds(own_class: str | None, post: Any, tmp_path: Path) -> None:
    """ "add_bos_token" has no effect beside a tokenizer.json since transformers 5."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for kind in ("metaspace", "llama 3"):
        bos, eos = ends_of(kind)
        build_tokenizer(kind, post).save(str(tmp_path / "tokenizer.json"))
        for adds in ({}, {"add_bos_token": True}, {"add_bos_token": False}):
            settings = {"bos_token": bos, "eos_token": eos, "tokenizer_class": own_class, **adds}
            settings = {key: value for key, value in settings.items() if value is not None}
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
            theirs: Any = AutoTokenizer.from_pretrained(tmp_path)
            own = load_tokenizer(tmp_path)
            begins = theirs("a").input_ids[0] == theirs.bos_token_id
            assert own.beginning == ((theirs.bos_token_id,) if begins else (theirs.eos_token_id,))


def test_a_beginning_that_is_the_end_changes_nothing(tmp_path: Path) -> None:
    """As in GPT-2's family: not one bit of the shards, and not the name of their folder."""
    folders = []
    for post in ("none", "bos"):
        write_model(tmp_path / post, "bytes")
        text = build_tokenizer("bytes", post).to_str().replace("</s>", "<other>").replace("<s>", "</s>")
        values = {**json.loads(text), "post_processor": json.loads(text)["post_processor"]}
        (tmp_path / post / "tokenizer.json").write_text(json.dumps(values))
        corpus = corpus_of(tmp_path, RECORDS["text"], tmp_path / post)
        assert corpus.bos == () and all(shard.mask is None for shard in corpus.train)
        folders.append(corpus)
    assert folders[0].train[0].tokens.tolist() == folders[1].train[0].tokens.tolist()
    assert folders[0].train[0].tokens[0] == folders[0].eot


@pytest.mark.parametrize("limit", few_fast([24, 40, 2**20], 40))
def test_the_step_from_an_end_to_a_beginning_is_never_learnt(limit: int, tmp_path: Path) -> None:
    """Each token and each end is a target once, however shards and windows lie; each beginning never."""
    write_model(tmp_path / "base", "metaspace")
    records = [{"text": line} for line in SHAKESPEARE[:3000].splitlines() if line]
    corpus = corpus_of(tmp_path, records, tmp_path / "base", shard_tokens=limit)
    tokenizer = corpus_tokenizer(corpus)
    (bos,) = tokenizer.bos
    documents = [tokenizer.encode(one["text"]) for one in records]
    divided = 0
    for shard in corpus.train:
        assert shard.mask is not None and len(shard.tokens) <= limit
        assert (shard.tokens == bos).tolist() == shard.mask.astype(bool).tolist()
        assert np.flatnonzero(shard.tokens == bos).tolist() == shard.starts.tolist()
        ends = [*shard.starts[1:].tolist(), len(shard.tokens)]
        assert all(shard.tokens[end - 1] == tokenizer.eot for end in ends)
        divided += len(shard.starts)
    read = [token for shard in corpus.train for token in shard.tokens.tolist() if token not in (bos, tokenizer.eot)]
    assert read == [token for ids in documents for token in ids]
    if limit == 2**20:
        assert divided == len(documents)
        loader = Loader(corpus, training_samples(corpus, 1, 16), selection(16))
        for position in range(40):
            (micro,) = loader.micros(position)
            assert not bool((micro.targets == bos).any())
            follows = micro.targets[0, :-1] == IGNORED_TARGET
            assert torch.equal(follows, micro.inputs[0, 1:] == bos)
        loader.close()
