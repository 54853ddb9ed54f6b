"""Which text is held out, by the numbers that were asked for: bytes of each source, of short and of long documents."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.data import holdout as holdout_module
from plait.data.documents import Document
from plait.data.holdout import Holdout, HoldoutSurvey
from plait.data.index import INDEX_FILE
from plait.data.preparation.build import DataRequest
from plait.data.preparation.prepare import prepare_corpus
from plait.data.preparation.tokens import corpus_tokenizer
from plait.data.shards import Corpus, Shard, open_corpus
from plait.data.sources import Source
from tests.matrix import slow


def document(text: str) -> Document:
    content = text.encode()
    return Document(name="test", text_bytes=len(content), content=content)


def chosen(sources: Sequence[Sequence[str]], fraction: float) -> Holdout:
    survey = HoldoutSurvey(fraction, len(sources))
    for number, texts in enumerate(sources):
        for text in texts:
            survey.add_document(document(text), number, "")
    return survey.choose("cut")


@dataclass(frozen=True, slots=True)
class Sides:
    """The parts of the texts of a source, in order."""

    train: list[str]
    held: list[str]

    @property
    def share(self) -> float:
        held, train = (sum(len(part.encode()) for part in parts) for parts in (self.held, self.train))
        return held / (held + train)


def sides(texts: Iterable[str], holdout: Holdout, source: int = 0) -> Sides:
    found = Sides([], [])
    for each in map(document, texts):
        spans = holdout.spans(each, source, "")
        assert [span.stop for span in spans[:-1]] == [span.start for span in spans[1:]], "no byte is lost or doubled"
        assert (spans[0].start, spans[-1].stop) == (0, each.text_bytes)
        for span in spans:
            part = b"".join(each.read(span.start, span.stop)).decode()
            (found.held if span.split == "heldout" else found.train).append(part)
    return found


def lines(draw: Random, nbytes: int) -> str:
    """At least so many bytes of lines of words, some of them ends of paragraphs."""
    text = ""
    while len(text) < nbytes:
        text += " ".join(f"w{draw.randrange(10**5)}" for _ in range(draw.randint(4, 12)))
        text += draw.choice(["\n", "\n", "\n", "\n\n"])
    return text


def test_one_text_gives_exactly_the_last_five_percent_of_its_bytes() -> None:
    text = "".join(chr(33 + n % 90) for n in range(100_000))
    found = sides([text], chosen([[text]], 0.05))
    assert found.held == [text[95_000:]]


@given(st.text(min_size=1, max_size=200), st.floats(0.01, 0.9))
def test_the_cut_moves_forward_to_a_whole_character_and_no_byte_is_lost(text: str, fraction: float) -> None:
    text = text.encode("utf-8", "ignore").decode()
    found = sides([text], chosen([[text]], fraction))
    taken, asked = sum(len(part.encode()) for part in found.held), int(len(text.encode()) * fraction)
    assert asked - 3 <= taken <= asked


def test_few_documents_give_the_tail_of_each_whatever_their_sizes() -> None:
    texts = [f"{n}" * (100 * n) for n in range(1, 20)]
    found = sides(texts, chosen([texts], 0.05))
    assert found.held == [text[len(text) - len(text) // 20 :] for text in texts]


def test_many_documents_are_held_out_whole_by_their_content_alone() -> None:
    texts = [f"document {n:04d}" for n in range(2000)]
    found = sides(texts, chosen([texts], 0.1))
    assert len(found.held) == 200, "a tenth of 2000 documents of one size"
    assert set(found.held) <= set(texts)
    assert sorted(found.held) == sorted(sides(texts[::-1], chosen([texts[::-1]], 0.1)).held), "in whatever order"
    assert set(found.held) <= set(sides(texts, chosen([texts], 0.2)).held), "a larger share has the same and more"


def test_long_files_beside_short_lines_give_their_share_and_so_do_the_lines() -> None:
    draw = Random(49)
    books, posts = [lines(draw, 300_000) for _ in range(3)], [f"post {n}: {lines(draw, 60)}" for n in range(300)]
    apart = chosen([*([book] for book in books), posts], 0.05)
    for number, texts in enumerate([*([book] for book in books), posts]):
        assert sides(texts, apart, number).share == pytest.approx(0.05, rel=0.03)
    together = chosen([[*books, *posts]], 0.05)
    assert sides(books, together).share == pytest.approx(0.05, rel=0.03)
    assert sides(posts, together).share == pytest.approx(0.05, rel=0.06), "15 of 300 of about one size"
    assert set(sides(posts, together).held) <= set(posts), "short texts are never cut"
    assert all(book.endswith(tail) for book, tail in zip(books, sides(books, together).held, strict=True))


def test_a_cut_falls_between_paragraphs_or_lines() -> None:
    draw = Random(1)
    books = [lines(draw, 200_000) for _ in range(25)]
    found = sides(books, chosen([books], 0.05))
    tails = [part for part in found.held if part not in books]
    assert len(tails) == 1 and len(found.held) == 2, "one and a quarter of 25 books: one whole, and a part of another"
    (before,) = (part for part in found.train if part not in books)
    assert before.endswith("\n\n") and before + tails[0] in books
    assert found.share == pytest.approx(0.05, rel=0.01)
    long_lines = [" ".join(f"w{draw.randrange(10**5)}" for _ in range(30_000)) for _ in range(25)]
    found = sides(long_lines, chosen([long_lines], 0.05))
    assert [part[0] for part in found.held if part not in long_lines] == [" "], "a line without end: between words"


@pytest.mark.parametrize(("fraction", "mixtures"), [(0.05, 1), *(slow((part, 6)) for part in (0.004, 0.05, 0.2, 0.5))])
def test_each_source_of_any_mixture_gives_its_share(fraction: float, mixtures: int) -> None:
    draw = Random(f"mixture {fraction}")
    for _ in range(mixtures):
        sources = [
            [
                lines(draw, 1 + int(draw.lognormvariate(draw.choice([4, 6, 9]), 1.5)))
                for _ in range(draw.randint(1, 400))
            ]
            for _ in range(draw.randint(2, 5))
        ]
        holdout = chosen(sources, fraction)
        for number, texts in enumerate(sources):
            enough = fraction * sum(map(len, texts)) > 20_000
            share = sides(texts, holdout, number).share
            assert share == pytest.approx(fraction, rel=0.06 if enough else 0.5, abs=0 if enough else 1) and share < 0.7


@pytest.mark.slow
def test_short_and_long_documents_of_one_source_are_held_out_alike() -> None:
    draw = Random(7)
    short, long = [lines(draw, 200) for _ in range(2000)], [lines(draw, 8000) for _ in range(2000)]
    holdout = chosen([[*short, *long]], 0.05)
    assert sides(short, holdout).share == pytest.approx(0.05, rel=0.03)
    assert sides(long, holdout).share == pytest.approx(0.05, rel=0.03)


def test_copies_stay_on_one_side_in_all_sources() -> None:
    texts = [f"document {n % 40}" for n in range(400)]
    found = sides(texts, chosen([texts], 0.3))
    assert found.share == pytest.approx(0.3, abs=0.013) and all(found.held.count(text) == 10 for text in found.held)
    draw = Random(3)
    shared = [lines(draw, draw.choice([80, 3000, 200_000])) for _ in range(60)]
    sources = [[*shared, *(lines(draw, 100) for _ in range(50 * number))] for number in range(4)]
    holdout = chosen(sources, 0.1)
    every = [sides(texts, holdout, number) for number, texts in enumerate(sources)]
    train = Counter(part for each in every for part in each.train)
    held = Counter(part for each in every for part in each.held)
    assert held and not set(train) & set(held)
    assert not any(tail in part for tail in held for part in train), "nor as a part of a longer text"


def test_texts_without_an_order_of_their_own_still_give_tails() -> None:
    texts = ["the same hundred characters, over and over. " * 3] * 50
    assert {len(part) for part in sides(texts, chosen([texts], 0.1)).held} == {13}
    assert sides(texts, chosen([texts], 0.0)).held == []


@pytest.mark.slow
def test_more_documents_than_can_be_listed_have_about_their_share_and_copies_elsewhere_agree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(holdout_module, "_MOST_LISTED", 1 << 12)
    draw = Random(11)
    many = [f"a short text {n:06d} of very many" for n in range(60_000)]
    few = [*draw.sample(many, 200), *(lines(draw, 30_000) for _ in range(5))]
    for order in ([many, few], [few, many]):
        holdout = chosen(order, 0.05)
        assert len(holdout.starts) < 2000, "the texts of a crowded group are not kept"
        both = [sides(texts, holdout, number) for number, texts in enumerate(order)]
        assert not set(both[0].train) & set(both[1].held) and not set(both[1].train) & set(both[0].held)
        large = both[order.index(many)]
        # Binomial: the deviation of the share is sqrt(0.05 * 0.95 / 60,000) = 0.0009, and four of them are enough.
        assert large.share == pytest.approx(0.05, abs=0.0036)
        assert both[order.index(few)].share == pytest.approx(0.05, rel=0.05)


def test_a_document_on_disk_and_one_in_memory_are_treated_alike(tmp_path: Path) -> None:
    text = "é中x" * 200_000
    (tmp_path / "a.txt").write_text(text)
    on_disk = Document(name="a", text_bytes=len(text.encode()), content=tmp_path / "a.txt")
    other = [f"other {n} {'x' * 200}" for n in range(30)]
    for texts in ([], other):
        survey = HoldoutSurvey(0.05, 1)
        for each in (*map(document, texts), on_disk):
            survey.add_document(each, 0, "")
        holdout = survey.choose("cut")
        assert holdout == chosen([[*texts, text]], 0.05)
        assert holdout.spans(on_disk, 0, "") == holdout.spans(document(text), 0, "")
        assert len(holdout.spans(on_disk, 0, "")) == 2
    assert "".join(on_disk.text()) == text


def prepared(folder: Path, tokenizer: Path, *sources: Source, holdout: float = 0.05) -> Corpus:
    request = DataRequest(sources=sources, tokenizer=str(tokenizer), vocabulary=None, holdout=holdout)
    return open_corpus(prepare_corpus(request, folder / "cache", lambda *_: None))


def texts_of(corpus: Corpus, shards: Iterable[Shard]) -> list[str]:
    tokenizer = corpus_tokenizer(corpus)
    return [
        tokenizer.decode(tokens[first + 1 : last].tolist())
        for shard in shards
        for tokens, bounds in [(shard.tokens, [*shard.starts.tolist(), len(shard.tokens) - 1])]
        for first, last in pairwise(bounds)
    ]


@pytest.mark.parametrize("weights", [(None, None, None), (1.0, 2.0, 0.5)])
def test_prepared_data_hold_out_the_share_of_each_source_and_the_index_says_so(
    tmp_path: Path, tokenizer_folder: Path, weights: tuple[float | None, ...]
) -> None:
    draw = Random(5)
    books = {f"book-{n}.txt": lines(draw, 100_000) for n in range(3)}
    posts = {f"posts-{n}.jsonl": [f"{n}: {lines(draw, 60 + 60 * n)}" for _ in range(300)] for n in range(2)}
    for name, text in books.items():
        (tmp_path / name).write_text(text)
    for name, texts in posts.items():
        (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    paths = [str(tmp_path / "book-*.txt"), *(str(tmp_path / name) for name in posts)]
    each = [Source(path, weight) for path, weight in zip(paths, weights, strict=True)]
    corpus = prepared(tmp_path, tokenizer_folder, *each)
    held, train = texts_of(corpus, corpus.heldout), texts_of(corpus, corpus.train)
    every = [list(books.values()), *posts.values()]
    by_source = [sum(len(part) for part in held if any(text.endswith(part) for text in texts)) for texts in every]
    sizes = [sum(map(len, texts)) for texts in every]
    for nbytes, size in zip(by_source, sizes, strict=True):
        assert nbytes == pytest.approx(0.05 * size, rel=0.05)
    assert sum(map(len, held)) + sum(map(len, train)) == sum(sizes) and not set(held) & set(train)
    index = json.loads((corpus.folder / INDEX_FILE).read_text())
    assert [row["heldout_bytes"] for row in index["sources"]] == by_source
    assert [source.heldout_bytes for source in corpus.sources] == by_source
    assert corpus.heldout_bytes == sum(by_source)
    assert corpus.weights == tuple(weight for weight in weights if weight)


def test_files_of_lines_in_one_folder_give_their_share_each(tmp_path: Path, tokenizer_folder: Path) -> None:
    draw = Random(6)
    (tmp_path / "all").mkdir()
    files = {f"{name}.jsonl": [f"{name} {lines(draw, 100)}" for _ in range(100)] for name in "abcd"}
    for name, texts in files.items():
        (tmp_path / "all" / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    corpus = prepared(tmp_path, tokenizer_folder, Source(str(tmp_path / "all")))
    held = texts_of(corpus, corpus.heldout)
    assert all(4 <= len(set(held) & set(texts)) <= 6 for texts in files.values())


def test_chats_of_each_source_give_their_share_by_whole_prompts(tmp_path: Path, tokenizer_folder: Path) -> None:
    draw = Random(8)
    sizes = {"long.jsonl": (40, 2000), "short.jsonl": (400, 60)}
    for name, (count, nbytes) in sizes.items():
        rows = [{"prompt": f"{name} {n // 2}?", "completion": lines(draw, nbytes)} for n in range(count)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = prepared(tmp_path, tokenizer_folder, *(Source(str(tmp_path / name)) for name in sizes), holdout=0.1)
    for source, (count, _) in zip(corpus.sources, sizes.values(), strict=True):
        assert source.heldout_bytes is not None
        assert source.heldout_bytes == pytest.approx(0.1 * source.text_bytes, rel=20 / count, abs=0)
    held, train = texts_of(corpus, corpus.heldout), texts_of(corpus, corpus.train)
    prompts = [{text.partition("?")[0] for text in texts} for texts in (held, train)]
    assert prompts[0] and not prompts[0] & prompts[1]
