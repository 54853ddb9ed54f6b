from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from plait.commands.preparing.balance_table import BalanceReport, ReplicaStats, balance_report
from plait.data.loader import Loader, SampleSelection
from plait.data.order import make_order
from plait.data.preparation.synthetic import write_synthetic
from plait.data.rows import IGNORED_TARGET
from plait.data.samples.windows import WindowReader
from plait.data.shards import Corpus, open_corpus
from plait.errors import PlaitError
from plait.recipe.load import parse_config
from plait.recipe.schema import RunConfig

GOLDEN = Path(__file__).parents[1] / "golden"
SEQUENCE, BATCH = 48, 32


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """Documents of one token to several sequences, parts of them never learned."""
    return open_corpus(write_synthetic(tmp_path, vocabulary=64, sequence=SEQUENCE, seed=4))


def config(**sections: dict[str, object]) -> RunConfig:
    size = {"sequence": SEQUENCE, "batch_tokens": SEQUENCE * BATCH}
    asked = {"run": {"name": "deal", "seed": 3}, "data": {"files": "none.txt"}, "train": size}
    return parse_config({**asked, **{name: {**asked.get(name, {}), **values} for name, values in sections.items()}})


def test_what_is_told_is_what_ranks_read(corpus: Corpus) -> None:
    parts = (20, 8, 4)
    told = balance_report(config(layout={"shares": list(parts)}, data={"mask_documents": True}), corpus, 3)
    assert told.remark == "" and told.steps == len(told.ratios_balanced) == 20
    order = make_order(corpus, 3, SEQUENCE)
    for number, part in enumerate(told.replicas):
        samples = SampleSelection(
            sequence=SEQUENCE,
            sequences_per_replica=parts,
            data_parallel_rank=number,
            lockstep_replicas=range(number, number + 1),
            micro_sequences=4,
            documents="mask",
            device=torch.device("cpu"),
        )
        loader = Loader(corpus, WindowReader(corpus.train, order, corpus.vocabulary), samples)
        micros = [micro for step in range(told.steps) for micro in loader.micros(step * BATCH)]
        loader.close()
        lengths = [length for micro in micros for length in micro.lengths or ()]
        counted = sum(int((micro.targets != IGNORED_TARGET).sum()) for micro in micros)
        assert part.tokens == sum(micro.targets.numel() for micro in micros) == told.steps * parts[number] * SEQUENCE
        assert part.pairs_balanced == pytest.approx(sum(n * (n + 1) / 2 for n in lengths) / part.tokens, rel=1e-12)
        assert part.counted_share == pytest.approx(counted / part.tokens, rel=1e-12)
        assert part.median_piece_tokens == torch.tensor(lengths, dtype=torch.float64).quantile(0.5)
        assert part.p90_piece_tokens == pytest.approx(float(torch.tensor(lengths, dtype=torch.float64).quantile(0.9)))
    assert max(told.ratios_balanced) < min(1.2, max(told.ratios_unbalanced))


def test_surprise_is_that_of_the_tokens_counts(corpus: Corpus) -> None:
    """Every target is one of few tokens, so its surprise lies around the entropy of their counts."""
    counts = sum(torch.bincount(torch.from_numpy(shard.tokens.astype("i8")), minlength=64) for shard in corpus.train)
    assert isinstance(counts, torch.Tensor)
    frequency = counts / counts.sum()
    entropy = -float((frequency * frequency.clamp_min(1e-12).log()).sum())
    told = balance_report(config(), corpus, 2)
    for part in told.replicas:
        assert part.unigram_nats_per_token == pytest.approx(entropy, rel=0.1)


def test_joined_documents_stay_as_they_come(corpus: Corpus) -> None:
    told = balance_report(config(data={"mask_documents": False}), corpus, 4)
    assert told.ratios_balanced == told.ratios_unbalanced
    assert [part.pairs_balanced for part in told.replicas] == [part.pairs_unbalanced for part in told.replicas]
    assert "joined" in told.remark


@pytest.mark.parametrize(
    ("sections", "parts", "complaint"),
    [
        ({"train": {"sequence": "auto"}}, 2, "train.sequence=512"),
        ({"train": {"batch_tokens": "auto"}}, 2, "train.batch_tokens=32768"),
        ({"train": {"batch_tokens": SEQUENCE * 3}}, 4, "3 sequences, too few for 4 ranks; choose --balance 3"),
        ({"train": {"batch_tokens": SEQUENCE}}, 4, "1 sequence, which cannot be divided"),
        (
            {"layout": {"shares": [31, 1]}},
            3,
            "layout.shares divides 32 sequences among 2 ranks, but --balance asks for 32 sequences among 3 ranks",
        ),
        ({"layout": {"shares": [30, 1]}}, 2, "layout.shares divides 31 sequences among 2 ranks"),
    ],
)
def test_what_cannot_be_divided_is_said_in_a_sentence(
    corpus: Corpus, sections: dict[str, dict[str, object]], parts: int, complaint: str
) -> None:
    with pytest.raises(PlaitError, match=complaint):
        balance_report(config(**sections), corpus, parts)


def test_the_table_as_people_read_it() -> None:
    def part(sequences: int, pairs: float) -> ReplicaStats:
        return ReplicaStats(
            sequences=sequences,
            tokens=20 * 512 * sequences,
            counted_share=0.875,
            pairs_unbalanced=198.04,
            pairs_balanced=pairs,
            median_piece_tokens=24,
            p90_piece_tokens=512,
            unigram_nats_per_token=6.719,
        )

    told = BalanceReport(
        steps=20,
        sequence=512,
        remark="documents are joined",
        replicas=(part(48, 198.5), part(16, 198.6)),
        ratios_unbalanced=(1.01, 1.09, 1.3),
        ratios_balanced=(1.0, 1.002, 1.011),
    )
    rows = told.table().split("\n")[1:5]
    assert max(map(len, rows)) <= 80, "a terminal of 80 columns would break the table's rows"
    text, golden = told.table() + "\n", GOLDEN / "data-balance.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text(), f"{golden} says otherwise; if the new text is right, write it by UPDATE_GOLDEN=1"
