"""A weight's name in words, as a verdict tells of it."""

from __future__ import annotations

from plait.model.names import auxiliary_head_of, depth_of, expert_of, layer_of, pattern_of

_PARTS = {
    "attention_norm": "attention norm",
    "attention.q": "attention query",
    "attention.k": "attention key",
    "attention.v": "attention value",
    "attention.query": "attention query",
    "attention.query_down": "query latent",
    "attention.query_norm": "query latent's norm",
    "attention.query_up": "attention query",
    "attention.key_value_down": "key and value latent",
    "attention.key_value_norm": "key and value latent's norm",
    "attention.key_value_up": "attention key and value",
    "attention.q_norm": "query norm",
    "attention.k_norm": "key norm",
    "attention.o": "attention output",
    "feedforward_norm": "feed-forward norm",
    "feedforward.gate": "feed-forward gate",
    "feedforward.up": "feed-forward input",
    "feedforward.down": "feed-forward output",
    "attention.queries_norm": "norm of all queries",
    "attention.keys_norm": "norm of all keys",
    "feedforward.router": "router",
    "feedforward.shared.gate": "shared experts' gate",
    "feedforward.shared.up": "shared experts' input",
    "feedforward.shared.down": "shared experts' output",
    "feedforward.experts.*.gate": "expert {}'s gate",
    "feedforward.experts.*.up": "expert {}'s input",
    "feedforward.experts.*.down": "expert {}'s output",
}
_WHOLE = {
    "embed.tokens.weight": "the token embedding",
    "embed.positions.weight": "the position table",
    "norm.weight": "the final norm's weight",
    "norm.bias": "the final norm's bias",
    "head.weight": "the head's weight",
    "norm": "the gradient's norm",
    "loss": "the loss and its tokens",
    "evaluation": "the held-out loss",
    "experts": "the tokens of each expert",
    "auxiliary": "the auxiliary losses and their tokens",
}
_DEPTH_PARTS = {
    "hidden_norm": "norm of the stream",
    "embedding_norm": "norm of the embedding",
    "projection": "projection",
    "norm": "last norm",
}


def weight_text(name: str) -> str:
    """A weight's name in words: "layers.3.attention.o.weight" becomes "layer 3's attention output weight"."""
    layer = layer_of(name)
    last, kind = name.rpartition(".")[0].rpartition(".")[2], name.rpartition(".")[2]
    if (after := auxiliary_head_of(name)) is not None:
        return f"the norm's {kind} of the head after {after} layers"
    if (depth := depth_of(name)) is not None:
        return f"the {_DEPTH_PARTS[last]}'s {kind} of depth {depth} of prediction ahead"
    if layer is None:
        return _WHOLE.get(name, name)
    part, _, kind = pattern_of(name).removeprefix("layers.*.").rpartition(".")
    return f"layer {layer}'s {_PARTS[part].format(expert_of(name))} {kind}"
