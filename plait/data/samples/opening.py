"""Opens the samples of a corpus: windows of its stream, or its examples packed into windows."""

from __future__ import annotations

from plait.data.order import check_sources, make_order, make_row_order
from plait.data.samples.packed import PackedReader, pack_examples
from plait.data.samples.reader import FiniteReader, RowReader, SampleReader
from plait.data.samples.sizes import Overlong
from plait.data.samples.windows import EndToEndReader, WindowReader
from plait.data.shards import Corpus
from plait.errors import PlaitError
from plait.units import part_of


def training_samples(
    corpus: Corpus, seed: int, sequence: int, *, overlong: Overlong = "refuse", epochs: float | None = None
) -> SampleReader:
    """The training samples by global position, a pure function of seed and position; with `epochs` they end after so
    many passes. Raises PlaitError where the data are too short, or an example is too long."""
    if corpus.layout == "stream":
        reader: SampleReader = WindowReader(corpus.train, make_order(corpus, seed, sequence), corpus.vocabulary)
    else:
        check_sources(corpus)
        packed = pack_examples(corpus.train, sequence, overlong, layout=corpus.layout)
        if not packed.windows or (corpus.weights and not all(packed.streams)):
            what = "pair" if corpus.layout == "pairs" else "example"
            raise PlaitError(f"a source has no {what} that fits into {sequence} tokens; give longer windows")
        order = make_row_order(packed.streams, corpus.weights, seed)
        reader = PackedReader(
            corpus.train, packed, order, sequence=sequence, eot=corpus.eot, vocabulary=corpus.vocabulary
        )
    return reader if epochs is None else FiniteReader(reader, part_of(epochs, reader.samples), corpus.eot)


def heldout_samples(corpus: Corpus, sequence: int, overlong: Overlong = "refuse") -> RowReader:
    """The held-out samples: over all of them each held-out token that is learned is a target exactly once.

    Raises PlaitError where an example is too long and that is refused.
    """
    ids = {"eot": corpus.eot, "vocabulary": corpus.vocabulary}
    if corpus.layout == "stream" or not corpus.heldout:
        return EndToEndReader(corpus.heldout, sequence=sequence, **ids)
    first_pair = train_pairs(corpus)
    packed = pack_examples(corpus.heldout, sequence, overlong, layout=corpus.layout, first_pair=first_pair)
    return PackedReader(corpus.heldout, packed, None, sequence=sequence, **ids)


def all_training_samples(corpus: Corpus, sequence: int, overlong: Overlong) -> RowReader:
    """The windows of packed training examples in their own order, each once. Raises PlaitError where an example is too
    long and that is refused."""
    packed = pack_examples(corpus.train, sequence, overlong, layout=corpus.layout)
    return PackedReader(corpus.train, packed, None, sequence=sequence, eot=corpus.eot, vocabulary=corpus.vocabulary)


def train_pairs(corpus: Corpus) -> int:
    """How many pairs the training part holds; the held-out ones are numbered on from it."""
    return sum(len(shard.starts) for shard in corpus.train) // 2


def all_pairs(corpus: Corpus) -> int:
    """How many pairs a corpus of pairs holds, in both parts."""
    return train_pairs(corpus) + sum(len(shard.starts) for shard in corpus.heldout) // 2
