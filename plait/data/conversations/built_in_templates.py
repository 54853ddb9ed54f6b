"""Chat templates that plait brings for families of models that people tune, with {% generation %} around answers.

Each gives the model the same text to read before its last answer as the template that its family is published with
(tests/data/test_built_in_templates.py compares them by transformers). Where such a template changes earlier turns, only
the last answer is marked, as the earlier ones would be learned after other text than the model gave them after.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from plait.data.conversations.chat_template import TemplateText, special_tokens, tokenizer_settings
from plait.errors import PlaitError
from plait.regular_file import read_regular_file

_FOLDER = Path(__file__).with_name("templates")
_TOKENS: Mapping[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "deepseek": ("<｜User｜>", "<｜Assistant｜>"),
    "deepseek-r1": ("<｜User｜>", "<｜Assistant｜>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "llama3.1": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral": (),
    "phi3": ("<|user|>", "<|assistant|>", "<|end|>"),
    "phi4": ("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
    "qwen2.5": ("<|im_start|>", "<|im_end|>"),
    "qwen3": ("<|im_start|>", "<|im_end|>"),
}
"""The built-in templates, and the tokens that each writes."""
BUILT_IN_TEMPLATES = tuple(_TOKENS)
_MOST_BYTES = 1 << 22
_WHERE = "plait's "


def named_template(name: str, folders: Sequence[Path]) -> TemplateText:
    """The built-in template of this name, or the one in this file, with the special tokens of the first of the folders
    that names any. Raises PlaitError where there is none."""
    special = next((found for folder in folders if (found := special_tokens(tokenizer_settings(folder)))), {})
    if name in _TOKENS:
        text = (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
        return TemplateText(text=text, where=f"{_WHERE}{name}", special=special)
    try:
        text = read_regular_file(Path(name), _MOST_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise PlaitError(
            f'data.chat_template = "{name}" cannot be read ({why}); write the path of a Jinja file, or one of '
            f"{', '.join(BUILT_IN_TEMPLATES)}"
        ) from None
    return TemplateText(text=text, where=name, special=special)


def check_tokens(template: TemplateText, tokens: Iterable[str]) -> None:
    """Raise PlaitError where a built-in template writes a token that is none of the tokenizer's: as ordinary text it
    would end no answer."""
    name = template.where.removeprefix(_WHERE)
    known = set(tokens) if name in _TOKENS else set[str]()
    if missing := [token for token in _TOKENS.get(name, ()) if token not in known]:
        raise PlaitError(
            f'data.chat_template = "{name}" writes {missing[0]}, which the tokenizer has no token for; choose the '
            "template of the model's family, or add the token to its tokenizer.json"
        )
