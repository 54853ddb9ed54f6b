"""Make a small preference set of the short chats (install/chats.py): answers that end, preferred to answers that run
on; for `make preferences`.

    .venv/bin/python install/pairs.py

Of every tenth chat the first question is the prompt and its answer the one that is chosen. The rejected answer is the
same text and then those of the next two chats, as of a model that does not know when to stop. Where the set is there
already, this ends at once.
"""

import json
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List

ROOT = Path(__file__).resolve().parents[1]
CHATS = ROOT / "models" / "chats.jsonl"
PAIRS = CHATS.with_name("pairs.jsonl")
EVERY, RUNS_ON = 10, 2
LONGEST_ANSWER = 200
"""Characters; the few longer answers are left out on both sides."""


def main() -> None:
    if PAIRS.is_file():
        return
    if not CHATS.is_file():
        sys.exit(f"plait: {CHATS.relative_to(ROOT)} is not there; make it with: make chats")
    lines = [json.dumps(pair, ensure_ascii=False) for pair in pairs_of(CHATS.read_text(encoding="utf-8").splitlines())]
    part = PAIRS.with_name("." + PAIRS.name + ".part")
    part.write_text("\n".join(lines) + "\n", encoding="utf-8")
    part.rename(PAIRS)
    print(f"{PAIRS.relative_to(ROOT)}: {len(lines):,} pairs of answers")


def pairs_of(lines: List[str]) -> Iterator[Dict[str, Any]]:
    """A pair for every tenth of these chats."""
    chats = [json.loads(line)["messages"][:2] for line in lines]
    chats = [chat for chat in chats if len(chat[1]["content"]) <= LONGEST_ANSWER]
    for at in range(0, len(chats), EVERY):
        question, answer = chats[at]
        others = [chats[(at + more) % len(chats)][1]["content"] for more in range(1, RUNS_ON + 1)]
        long = " ".join([answer["content"], *others])
        yield {"prompt": [question], "chosen": [answer], "rejected": [{"role": "assistant", "content": long}]}


if __name__ == "__main__":
    main()
