"""The tokens that end the texts of a corpus, and that a run therefore teaches its model to write."""

from __future__ import annotations

import tokenizers

from plait.data.conversations.chat_template import ChatTemplate, find_template
from plait.data.preparation.tokens import Tokenizer
from plait.data.shards import Corpus


def end_of_turn(template: ChatTemplate, backend: tokenizers.Tokenizer) -> str | None:
    """The special token with which a template ends an answer; None if answers end without one."""
    after = template.after_answer()
    special = (one.content for one in backend.get_added_tokens_decoder().values() if one.special)
    return min((one for one in special if one in after), key=after.index, default=None)


def learnt_end_of_turn(corpus: Corpus, tokenizer: Tokenizer) -> str | None:
    """The special token that ends each answer of a chat corpus; None if there is none, or if the corpus has no
    chats."""
    found = find_template([corpus.folder]) if corpus.template else None
    return None if found is None else end_of_turn(ChatTemplate(found), tokenizer.backend)


def learnt_ends(corpus: Corpus, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids of the tokens with which texts of a corpus end: the end of a turn, if it has chats, then that of a text."""
    turn = learnt_end_of_turn(corpus, tokenizer)
    token = None if turn is None else tokenizer.backend.token_to_id(turn)
    return (tokenizer.eot,) if token in (None, tokenizer.eot) else (token, tokenizer.eot)
