"""How fast data flow: preparing (MB/s, memory) and loading (tokens/s of one rank, one thread); `--json OUT` keeps it.

Bars: 100 MB prepared in 90 s within 2 GB on two cores; 20 M tokens/s at 256 and at 2,048 tokens, from the page cache,
shuffled, with document starts. Loading is timed as training uses it: order, gather and tensors in the loader's thread.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Literal

import torch

from plait.data.loader import Loader, SampleSelection
from plait.data.preparation.build import DataRequest
from plait.data.preparation.prepare import prepare_corpus
from plait.data.samples.opening import training_samples
from plait.data.shards import Corpus, open_corpus
from plait.data.sources import Source

SHAKESPEARE = Path(__file__).parents[1] / "recipes" / "shakespeare.txt"
DOCUMENT_LINES = 50
STEP_TOKENS = 1 << 16
MICRO_TOKENS = 1 << 14
STEPS = 100
REPEATS = 7


def main() -> None:
    """Parse the command line, measure, print one line a figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--megabytes", type=int, default=100, help="how much text to prepare (default 100)")
    parser.add_argument("--prepare-in", type=Path, help=argparse.SUPPRESS)  # the child whose memory is measured
    options = parser.parse_args()
    if options.prepare_in:
        prepare_once(options.prepare_in)
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        write_text(Path(scratch), options.megabytes * 1_000_000)
        figures, corpus = preparing(Path(scratch))
        figures |= loading(corpus)
    for name, value in figures.items():
        print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def write_text(folder: Path, size: int) -> None:
    """Half of `size` as one text file, half as JSONL documents: shuffled lines with words that no one has seen."""
    files = [SHAKESPEARE, *sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    lines = [line for file in files for line in file.read_text(encoding="utf-8", errors="ignore").splitlines() if line]
    chance = random.Random(0)
    with (folder / "a.txt").open("w", encoding="utf-8") as file:
        while file.tell() < size // 2:
            file.write("\n".join(new_lines(lines, chance)) + "\n")
    with (folder / "b.jsonl").open("w", encoding="utf-8") as file:
        while file.tell() < size - size // 2:
            file.write(json.dumps({"text": "\n".join(new_lines(lines, chance))}) + "\n")


def new_lines(lines: list[str], chance: random.Random) -> list[str]:
    """Some lines, each with one word written backwards."""
    found = []
    for line in chance.choices(lines, k=DOCUMENT_LINES):
        words = line.split(" ")
        place = chance.randrange(len(words))
        words[place] = words[place][::-1]
        found.append(" ".join(words))
    return found


def preparing(folder: Path) -> tuple[dict[str, float | str], Corpus]:
    """Prepare in a process of its own, so that the peak is that of preparing alone."""
    command = [sys.executable, __file__, "--prepare-in", str(folder)]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    megabytes = sum((folder / name).stat().st_size for name in ("a.txt", "b.jsonl")) / 1e6
    figures: dict[str, float | str] = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "text, MB": megabytes,
        "prepare, s": answer["seconds"],
        "prepare, processor s (all threads)": answer["processor_s"],
        "prepare, MB/s": megabytes / answer["seconds"],
        "prepare, peak resident GB": answer["peak_bytes"] / 1e9,
    }
    return figures, open_corpus(Path(answer["folder"]))


def prepare_once(folder: Path) -> None:
    """Prepare the text in `folder` and print time, memory and place as JSON."""
    sources = (Source(str(folder / "a.txt")), Source(str(folder / "b.jsonl")))
    request = DataRequest(sources=sources, tokenizer="gpt2", vocabulary=None, holdout=0.05)
    began = time.perf_counter()
    corpus = prepare_corpus(request, folder, lambda done, total, stage: None)
    seconds = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_SELF)
    processor_s = used.ru_utime + used.ru_stime
    figures = {"seconds": seconds, "processor_s": processor_s, "peak_bytes": used.ru_maxrss * 1024}
    print(json.dumps({**figures, "folder": str(corpus)}))


def loading(corpus: Corpus) -> dict[str, float | str]:
    """Million tokens a second, the median of several repeats."""
    figures: dict[str, float | str] = {}
    for sequence in (256, 2048):
        for documents in ("mask", "join"):
            speeds = [load(corpus, sequence, documents, repeat) for repeat in range(REPEATS)]
            figures[f"load, {sequence} tokens, documents {documents}, M tokens/s"] = statistics.median(speeds) / 1e6
    return figures


def load(corpus: Corpus, sequence: int, documents: Literal["mask", "join"], repeat: int) -> float:
    """Tokens a second over STEPS steps; each repeat reads other ones."""
    rows = STEP_TOKENS // sequence
    samples = SampleSelection(
        sequence=sequence,
        sequences_per_replica=(rows,),
        data_parallel_rank=0,
        lockstep_replicas=range(1),
        micro_sequences=MICRO_TOKENS // sequence,
        documents=documents,
        device=torch.device("cpu"),
    )
    loader = Loader(corpus, training_samples(corpus, 1, sequence), samples)
    began = time.perf_counter()
    for step in range(repeat * STEPS, (repeat + 1) * STEPS):
        loader.micros(step * rows)
    took = time.perf_counter() - began
    loader.close()
    return STEPS * STEP_TOKENS / took


if __name__ == "__main__":
    main()
