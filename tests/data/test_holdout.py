from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from plait.data.documents import Document
from plait.data.holdout import (
    DocumentSurvey,
    HoldoutRule,
    choose_holdout_rule,
    holdout_spans,
    survey_documents,
    text_blocks,
)


def document(text: str) -> Document:
    content = text.encode()
    return Document(name="test", text_bytes=len(content), content=content)


def found(texts: list[str], fraction: float) -> DocumentSurvey:
    return sum(survey_documents([document(text) for text in texts], fraction), DocumentSurvey())


def held(texts: list[str], rule: HoldoutRule, fraction: float) -> list[bytes]:
    sides = [(each, span) for each in map(document, texts) for span in holdout_spans(each, rule, fraction)]
    return [b"".join(each.read(span.start, span.stop)) for each, span in sides if span.split == "heldout"]


def test_one_text_gives_exactly_the_last_five_percent_of_its_bytes() -> None:
    text = "".join(chr(33 + n % 90) for n in range(100_000))
    assert held([text], "tails", 0.05) == [text[95_000:].encode()]
    assert choose_holdout_rule(found([text], 0.05), 0.05) == "tails"


@given(st.text(min_size=1, max_size=200), st.floats(0.01, 0.9))
def test_the_cut_moves_forward_to_a_whole_character_and_no_byte_is_lost(text: str, fraction: float) -> None:
    text = text.encode("utf-8", "ignore").decode()
    each = document(text)
    sides = holdout_spans(each, "tails", fraction)
    assert b"".join(b"".join(each.read(span.start, span.stop)) for span in sides) == text.encode()
    for span in sides:
        b"".join(each.read(span.start, span.stop)).decode()
    taken = sum(span.stop - span.start for span in sides if span.split == "heldout")
    asked = int(len(text.encode()) * fraction)
    assert asked - 3 <= taken <= asked


def test_many_documents_are_held_out_whole_by_their_content_alone() -> None:
    texts = [f"document {n}" for n in range(2000)]
    assert choose_holdout_rule(found(texts, 0.1), 0.1) == "documents"
    chosen = held(texts, "documents", 0.1)
    assert 140 < len(chosen) < 260
    assert sorted(chosen) == sorted(held(texts[::-1], "documents", 0.1))
    assert set(chosen) <= {text.encode() for text in texts}
    assert set(chosen) <= set(held(texts, "documents", 0.2)), "a larger fraction holds out the same documents and more"


def test_duplicates_stay_on_one_side() -> None:
    texts = [f"document {n % 40}" for n in range(400)]
    chosen = held(texts, "documents", 0.3)
    assert chosen
    assert all(chosen.count(text) == 10 for text in set(chosen))


def test_the_rule_falls_back_to_tails() -> None:
    assert choose_holdout_rule(found([f"text {n}" for n in range(19)], 0.5), 0.5) == "tails", "too few documents"
    assert choose_holdout_rule(found(["the same"] * 50, 0.5), 0.5) == "tails", "all on one side"
    assert choose_holdout_rule(found([f"text {n}" for n in range(50)], 0.0), 0.0) == "none"


def test_a_document_on_disk_and_one_in_memory_are_treated_alike(tmp_path: Path) -> None:
    text = "é中x" * 200_000
    (tmp_path / "a.txt").write_text(text)
    on_disk = Document(name="a", text_bytes=len(text.encode()), content=tmp_path / "a.txt")
    for rule in ("documents", "tails"):
        assert holdout_spans(on_disk, rule, 0.05) == holdout_spans(document(text), rule, 0.05)
    assert list(survey_documents([on_disk], 0.05)) == list(survey_documents([document(text)], 0.05))
    assert "".join(text_blocks(on_disk.read())) == text
