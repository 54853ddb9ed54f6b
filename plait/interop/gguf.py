"""A .gguf file as a folder in Hugging Face's format: converted once, by transformers' reader, into float32.

What that reader drops in silence is refused here: stretched rotary positions, caps and other windows of Gemma 3. What
it gets wrong is fixed: a pre-tokenizer that splits digits, and sizes that it leaves at those of the family's first
model.
"""

from __future__ import annotations

import json
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

from plait.errors import PlaitError, installing

GGUF_FAMILIES = (
    "gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma3", "mixtral", "olmoe", "qwen3_moe", "deepseek_v3",
)  # fmt: skip
"""Values of general.architecture that are read; in these files other families store some weights changed."""
_LEFT_OUT = ("quantization_config", "_name_or_path", "transformers_version")
_UNREAD_SIZES = {
    "gpt2": {"n_positions": "context_length", "n_inner": "feed_forward_length"},
    "qwen3": {"head_dim": "attention.key_length"},
    "gemma3": {"query_pre_attn_scalar": "attention.key_length"},
}
"""By family, the keys of config.json that the reader leaves at their defaults, and where the file has them."""
_DROPPED = {
    "gemma3": {
        "rope.freq_base_swa": "10000.0",
        "attention.sliding_window_pattern": "6",
        "attn_logit_softcapping": "",
        "final_logit_softcapping": "",
    },
}
"""By family, fields of the file that the reader drops, and what it computes with in their place."""
_SPLITS_DIGITS = ("smollm",)
"""Values of `tokenizer.ggml.pre` whose tokenizers take each digit by itself."""


def convert_gguf(file: Path, folder: Path) -> None:
    """Write the model of a .gguf file, its weights de-quantized, and its tokenizer into an empty folder; needs its
    whole memory once. Raises PlaitError for a file that cannot be read, and OSError where the disk refuses."""
    try:
        import accelerate  # noqa: F401  transformers' reader wants it
        import gguf
        import transformers
    except ImportError:
        needed = f"reading {file.name} needs the packages transformers, accelerate and gguf"
        raise PlaitError(f"{needed}; bring them: {installing('transformers')} accelerate gguf") from None
    fields = _checked_fields(gguf, file)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    place: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
    sizes = {key: int(fields[named]) for key, named in _UNREAD_SIZES.get(fields["family"], {}).items() if fields[named]}
    try:
        with redirect_stderr(StringIO()):  # a bar of its own, which no setting turns off
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                file.parent, **place, **sizes, dtype="float32"
            )
            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(file.parent, **place)
    except Exception as error:  # of several libraries; the one for tokenizers raises bare Exception
        raise PlaitError(
            f"transformers cannot read {file} ({str(error).splitlines()[0]:.200}); take the model in safetensors"
        ) from None
    if fields["pre"] in _SPLITS_DIGITS:
        _split_digits(tokenizer)
    _write(model, tokenizer, folder)


def _checked_fields(gguf: Any, file: Path) -> dict[str, str]:
    """Checks of a file before transformers reads it; raises PlaitError for anything that it would drop."""
    try:
        reader = gguf.GGUFReader(file)
    except (ValueError, IndexError, OverflowError) as error:
        raise PlaitError(f"{file} is not a complete GGUF file ({error!s:.200}); download it again") from None
    family = _text(reader, "general.architecture")
    if family not in GGUF_FAMILIES:
        raise PlaitError(
            f"{file} is a model of the family {family!r}, none of those that plait reads from such files: "
            f"{', '.join(GGUF_FAMILIES)}; take the model in safetensors"
        )
    scaling = _text(reader, f"{family}.rope.scaling.type")
    if any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors) or scaling not in ("", "none"):
        raise PlaitError(
            f"{file} stretches its rotary positions, which transformers' GGUF reader drops; take the model in "
            "safetensors"
        )
    for key, kept in _DROPPED.get(family, {}).items():
        if (found := _text(reader, f"{family}.{key}")) not in ("", kept):
            raise PlaitError(
                f"{file} has {family}.{key} = {found:.40}, which transformers' GGUF reader drops; take the model in "
                "safetensors"
            )
    sizes = {named: _text(reader, f"{family}.{named}") for named in _UNREAD_SIZES.get(family, {}).values()}
    return {"family": family, "pre": _text(reader, "tokenizer.ggml.pre"), **sizes}


def _text(reader: Any, key: str) -> str:
    field = reader.get_field(key)
    return "" if field is None else str(field.contents())


def _split_digits(tokenizer: Any) -> None:
    from tokenizers import pre_tokenizers

    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)  # type: ignore[arg-type]


def _write(model: Any, tokenizer: Any, folder: Path) -> None:
    from safetensors.torch import save_file

    config = {key: value for key, value in model.config.to_dict().items() if key not in _LEFT_OUT}
    text = json.dumps({**config, "dtype": "float32", "torch_dtype": "float32"}, indent=2, default=str)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    tied = bool(config.get("tie_word_embeddings"))
    weights = {name: weight.detach().contiguous() for name, weight in model.named_parameters()}
    kept = {name: weight for name, weight in weights.items() if not (tied and name == "lm_head.weight")}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)
