"""Text to token ids and back: the tokenizer of a corpus."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import tokenizers

from plait.data.conversations.chat_template import special_tokens, token_text, tokenizer_settings
from plait.data.index import INDEX_FILE, damaged, read_index, write_synced
from plait.data.preparation.cuts import GPT2_CUT, OTHER_CUT, adds_text_prefix, prefix_cut, split_long_runs
from plait.data.shards import Corpus
from plait.errors import PlaitError
from plait.regular_file import read_regular_text

END_OF_TEXT = "<|endoftext|>"
_OTHER_ENDS = ("</s>", "<|end_of_text|>", "<|im_end|>", "<eos>", "<|eot_id|>", "[EOS]")

SMALLEST_BPE = 257
"""One entry for every byte, and the end of text."""

_OTHER_CONTEXTS = ("\n", ".", ",", "0", "")
"""What a piece is encoded behind where the character before it would become part of its first token; the last one
always works, and gives the piece a prefix."""

_PLACEHOLDERS = ("image_token", "audio_token", "video_token")
"""Settings that name the token which stands for a picture or a sound."""

_PROBE = "One.\n\nTwo;\nthree\n  four 4\n\n\n(five)\tsix\nseven"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokenizer:
    """A loaded tokenizer: `vocabulary` is the largest id plus one, `hash` is over its canonical JSON."""

    backend: tokenizers.Tokenizer
    definition: str
    eot: int
    eot_text: str
    bos: tuple[int, ...]
    """The token before a text (BOS), if it is not `eot`; empty if texts begin with `eot`."""
    vocabulary: int
    hash: str
    cut: re.Pattern[str]
    adds_prefix: bool
    """Whether a text's first word is encoded as if a space stood before it (SentencePiece), so that text which goes on
    must be encoded behind what it follows."""

    @property
    def beginning(self) -> tuple[int, ...]:
        """Ids that stand before every document and every prompt."""
        return self.bos or (self.eot,)

    @property
    def bos_text(self) -> str:
        """The text of `bos`; empty where there is none."""
        return "".join(str(self.backend.id_to_token(token)) for token in self.bos)

    @property
    def added_entries(self) -> int:
        """How many of the last ids are tokens that were added to the trained ones."""
        added, count = self.backend.get_added_tokens_decoder(), 0
        while self.vocabulary - 1 - count in added:
            count += 1
        return count

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; a special token's text in it is encoded as ordinary text, so that only real ends are
        ends."""
        return self.encode_pieces([text])[0]

    def encode_pieces(self, pieces: Sequence[str], before: Sequence[str] = ()) -> list[list[int]]:
        """Token ids of each of many pieces, computed on all cores. `before` is the character before each in its
        document, empty where the document begins. Text without spaces is encoded in parts, see Note [long runs are
        split], unless this `adds_prefix`."""
        if self.adds_prefix:
            return _encode_behind(self.backend, pieces, before or [""] * len(pieces))
        parts = [split_long_runs(piece) for piece in pieces]
        found = iter(self.backend.encode_batch_fast(list(chain.from_iterable(parts)), add_special_tokens=False))
        return [list(chain.from_iterable(next(found).ids for _ in own)) for own in parts]

    def may_cut_token(self, before: str, piece: str) -> bool:
        """Whether the whole text may have a token that lies on both sides of the place before a piece. Only of a
        tokenizer that `adds_prefix`: others divide runs of text anywhere, see Note [long runs are split]."""
        return self.adds_prefix and before != "" and self.cut.match(before + piece, len(before)) is None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, including the text of special tokens."""
        return self.backend.decode(list(ids), skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and the name of the end-of-text token, so that `load_tokenizer(folder)` returns the
        same tokenizer."""
        write_synced(folder / "tokenizer.json", self.definition)
        config = json.dumps({"eos_token": self.eot_text}, ensure_ascii=False)
        write_synced(folder / "tokenizer_config.json", config)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load "gpt2" (shipped), a tokenizer.json, or a folder that holds one; raises PlaitError where none can be used."""
    file = Path(__file__).parent / "gpt2" if path == "gpt2" else Path(path)
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise PlaitError(f'there is no tokenizer "{path}"; write "gpt2", "bpe", or the path of a tokenizer.json')
    try:
        definition = read_regular_text(file)
        settings = json.dumps(tokenizer_settings(file.parent), sort_keys=True)
        tokenizer = _parsed_tokenizer(definition, settings, str(file))
        if (file.parent / INDEX_FILE).is_file():  # a corpus says itself how its documents begin
            tokenizer = replace(tokenizer, bos=read_index(file.parent).bos)
        return tokenizer
    except PlaitError:
        raise
    except Exception as error:  # the Rust side raises bare Exception
        raise PlaitError(f"{file} is not a tokenizer.json ({error}); name another file in data.tokenizer") from None


def corpus_tokenizer(corpus: Corpus) -> Tokenizer:
    """The tokenizer that a corpus was made with; raises PlaitError where the file in its folder is another one."""
    tokenizer = load_tokenizer(corpus.folder)
    if tokenizer.hash != corpus.tokenizer_hash:
        raise damaged(corpus.folder, "tokenizer.json is not what was written")
    return tokenizer


def encode_alike(one: Tokenizer, other: Tokenizer, texts: Sequence[str]) -> bool:
    """Whether two tokenizers do the same although their files differ, as that of a .gguf file does from the
    tokenizer.json that it was made from: each id of the first stands for the same token in the other, texts begin with
    the same ids, and these texts are encoded alike."""
    known, others = (each.backend.get_vocab(with_added_tokens=True) for each in (one, other))
    same_ids = known.items() <= others.items() and one.beginning == other.beginning
    return same_ids and one.encode_pieces(texts) == other.encode_pieces(texts)


def train_bpe(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Train byte-level BPE with GPT-2's pre-tokenization; the same texts give the same tokenizer bit for bit."""
    check_bpe_vocabulary(vocabulary)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(chain.from_iterable(map(split_long_runs, texts)), trainer)
    return load_trained(backend.to_str())


def load_trained(definition: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json that `train_bpe` made."""
    return _tokenizer(tokenizers.Tokenizer.from_str(definition), definition, {}, "the trained tokenizer")


def check_bpe_vocabulary(vocabulary: int) -> None:
    """Raises PlaitError for a vocabulary without room for every byte."""
    if vocabulary < SMALLEST_BPE:
        raise PlaitError(f"model.vocabulary = {vocabulary} is too small; choose at least {SMALLEST_BPE}")


def bpe_vocabulary(text_bytes: int) -> int:
    """Default vocabulary size for a corpus of this size: a typical entry occurs a hundred times or more."""
    for limit, vocabulary in ((1 << 19, 1024), (1 << 25, 4096), (1 << 30, 16384)):
        if text_bytes < limit:
            return vocabulary
    return 32768


@lru_cache(maxsize=2)
def _parsed_tokenizer(definition: str, settings: str, name: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json and its settings as JSON; a large one takes a second to parse, and a command
    loads it several times."""
    return _tokenizer(tokenizers.Tokenizer.from_str(definition), definition, json.loads(settings), name)


def _tokenizer(backend: tokenizers.Tokenizer, definition: str, settings: Mapping[str, Any], name: str) -> Tokenizer:
    if without := _without_placeholders(backend, definition, settings):
        definition, backend = without, tokenizers.Tokenizer.from_str(without)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    if getattr(backend.model, "dropout", None):
        backend.model.dropout = None  # BPE dropout would make the corpus a matter of chance
    ids = backend.get_vocab(with_added_tokens=True)
    end = token_text(settings, "eos_token")
    eot_text = next((text for text in (END_OF_TEXT, end, *_OTHER_ENDS) if text in ids), None)
    if eot_text is None:
        raise PlaitError(f"{name} has no end-of-text token; add eos_token to the tokenizer_config.json next to it")
    values = json.loads(definition)
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    if eot_text != next((text for text in (END_OF_TEXT, *_OTHER_ENDS) if text in ids), None):
        canonical += eot_text  # another end of documents is another corpus
    vocabulary = max(ids.values()) + 1
    adds_prefix = adds_text_prefix(values)
    bos = written_before_texts(backend, settings)
    if any(token >= vocabulary for token in bos):
        raise PlaitError(f"{name} begins texts with a token that it does not have; download it again")
    return Tokenizer(
        backend=backend,
        definition=definition,
        eot=ids[eot_text],
        eot_text=eot_text,
        bos=() if bos == (ids[eot_text],) else bos,
        vocabulary=vocabulary,
        hash=sha256(canonical.encode()).hexdigest(),
        cut=prefix_cut(values) if adds_prefix else _fitting_cut(backend),
        adds_prefix=adds_prefix,
    )


def _without_placeholders(backend: tokenizers.Tokenizer, definition: str, settings: Mapping[str, Any]) -> str:
    """The tokenizer.json without tokens for pictures and sounds at the end of the vocabulary; empty if there are none.

    No text has them, and a model of text has no row for them: Gemma 3 with 1B parameters has 262,144 rows, and its
    tokenizer, which is also that of the larger ones, 262,145 entries.
    """
    named = {text for key, text in special_tokens(settings).items() if key in _PLACEHOLDERS}
    added = backend.get_added_tokens_decoder()
    last, dropped = max(backend.get_vocab(with_added_tokens=True).values(), default=-1), set[int]()
    while last in added and added[last].content in named:
        dropped.add(last)
        last -= 1
    if not dropped:
        return ""
    values = json.loads(definition)
    values["added_tokens"] = [token for token in values["added_tokens"] if token["id"] not in dropped]
    return json.dumps(values, ensure_ascii=False)


def written_before_texts(backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that transformers' AutoTokenizer (5) puts before a text: those of the post-processor. "add_bos_token" has
    no effect beside a tokenizer.json, and GPT-NeoX's class never adds any."""
    if str(settings.get("tokenizer_class")).removesuffix("Fast") == "GPTNeoXTokenizer":
        return ()
    for text in chain(("a",), backend.get_vocab()):
        found = backend.encode(text)
        if 0 in found.special_tokens_mask:
            return tuple(found.ids[: found.special_tokens_mask.index(0)])
    return ()  # it encodes no text at all


def _encode_behind(backend: tokenizers.Tokenizer, pieces: Sequence[str], before: Sequence[str]) -> list[list[int]]:
    """Token ids of pieces, each without those of the character before it: that one has the prefix which a text is
    given. A character that joins the piece in a token, where a run without spaces was divided, is replaced."""

    def ids(texts: Iterable[str]) -> list[list[int]]:
        return [found.ids for found in backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    joined, alone = ids(map("".join, zip(before, pieces, strict=True))), ids(before)
    for number, piece in enumerate(pieces):
        for other in _OTHER_CONTEXTS:
            if joined[number][: len(alone[number])] == alone[number]:
                break
            joined[number], alone[number] = ids((other + piece, other))
    return [whole[len(known) :] for whole, known in zip(joined, alone, strict=True)]


def _fitting_cut(backend: tokenizers.Tokenizer) -> re.Pattern[str]:
    splitter = backend.pre_tokenizer
    if splitter is None:
        return OTHER_CUT

    def words(text: str) -> list[str]:
        return [word for word, _ in splitter.pre_tokenize_str(text)]

    starts = [0, *(found.start() for found in GPT2_CUT.finditer(_PROBE) if found.start())]
    parts = [_PROBE[start:stop] for start, stop in zip(starts, [*starts[1:], None], strict=True)]
    same = words(_PROBE) == [word for part in parts for word in words(part)]
    return GPT2_CUT if same else OTHER_CUT
