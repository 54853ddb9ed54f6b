"""Questions made of WordNet's files: each is one that plait reads, with the noun's own definition as its answer."""

from __future__ import annotations

from pathlib import Path

from benchmarks.wordnet_choices import CHOICES, NEIGHBOURS, main
from plait.data.choices import read_questions

WORDS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


def write_wordnet(folder: Path) -> dict[str, str]:
    """Files as wndb(5WN) describes them, of 120 nouns on two topics; returns what each of those to ask for means."""
    meanings, data, index = dict[str, str](), ["  1 a licence"], ["  1 a licence"]
    for number in range(120):
        tens, ones = divmod(number, 10)
        word = f"noun{chr(97 + tens)}{chr(97 + ones)}"
        definition = f"the {WORDS[ones]} thing of group {chr(97 + tens)} in the list{' of them all' * (number % 3)}"
        senses, counted = ("2" if number == 50 else "1"), ("0" if number == 60 else "3")
        if number == 70:
            definition = f"a {word} by its own name and no other"
        offset, topic = f"{number:08}", f"{3 + number % 2:02}"
        data.append(f'{offset} {topic} n 01 {word} 0 001 @ 00000000 n 0000 | {definition}; "an example"  ')
        index.append(f"{word} n {senses} 2 @ ~ {senses} {counted} {offset}{' 00000001' * (senses == '2')}  ")
        if number not in (50, 60, 70):
            meanings[word] = definition
    folder.mkdir()
    (folder / "data.noun").write_text("\n".join(data))
    (folder / "index.noun").write_text("\n".join(index))
    return meanings


def test_every_question_has_the_nouns_own_meaning_as_its_answer(tmp_path: Path) -> None:
    meanings = write_wordnet(tmp_path / "wordnet")
    files = [tmp_path / f"{name}.jsonl" for name in ("one", "same", "other", "few")]
    for file, more in zip(files, (["--seed", "5"], ["--seed", "5"], [], ["--questions", "7"]), strict=True):
        main([str(tmp_path / "wordnet"), "--to", str(file), *more])
    assert files[0].read_text() == files[1].read_text() != files[2].read_text()
    asked = read_questions(files[0])
    assert len(asked) == len(meanings) == 117 and len(read_questions(files[3])) == 7
    topics: list[list[str]] = [[], []]
    for word, meaning in sorted(meanings.items(), key=lambda one: (len(one[1]), one[1])):
        topics[ord(word[-1]) % 2].append(meaning)
    for question in asked:
        word = question.text.split('"')[1]
        own = question.choices[question.answer]
        assert own == meanings[word] and len(set(question.choices)) == CHOICES
        places = [topics[ord(word[-1]) % 2].index(choice) for choice in question.choices]
        assert max(places) - min(places) <= NEIGHBOURS
    assert {question.answer for question in asked} == set(range(CHOICES))
