"""Models whose layers differ are counted exactly where it decides, and planned without a pipeline where layers use
each other's keys."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.errors import PlaitError
from plait.interop.config_in import shape_of_config
from plait.layout import Layout
from plait.model.gpt import GPT
from plait.model.shape import ModelShape, parameter_count
from plait.model.weights import training_flops_per_token
from plait.planner.problem.workload import workload_of
from plait.planner.search.enumeration import LAYERS_JOINED, STATES_PASS_ON, Constraints, enumerate_layouts
from plait.planner.search.validity import check_layout

SMALL = {
    "model_type": "gemma4_text", "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35,
    "num_attention_heads": 8, "num_key_value_heads": 1, "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
    "final_logit_softcapping": 30.0,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
}  # fmt: skip
"""About what Gemma 4 E2B is."""
LARGE = {
    "model_type": "gemma4_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60,
    "num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4, "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0, "sliding_window": 1024,
}  # fmt: skip
"""About what Gemma 4 31B is."""
HYBRID = {
    "model_type": "qwen3_5_text", "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24,
    "num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True, "linear_num_value_heads": 16,
}  # fmt: skip
"""About what Qwen 3.5 0.8B is."""
SHAPES = {name: shape_of_config(values) for name, values in (("small", SMALL), ("large", LARGE), ("hybrid", HYBRID))}


@pytest.mark.parametrize("name", SHAPES)
def test_the_planner_weighs_what_is_built(name: str) -> None:
    import torch

    shape = replace(SHAPES[name], sequence=2048)
    with torch.device("meta"):
        built = sum(one.numel() for one in GPT(shape).parameters())
    assert parameter_count(shape) == built
    work = workload_of(shape, sequence=2048, batch_sequences=8)
    assert work.parameters == pytest.approx(built, rel=2e-3)
    assert work.flops_per_token("full") == pytest.approx(training_flops_per_token(shape, 2048, "full"), rel=0.01)


def enumerated(shape: ModelShape) -> tuple[set[int], int]:
    """The degrees of the pipeline among all layouts, and how many were refused because layers belong together."""
    work = workload_of(replace(shape, sequence=2048), sequence=2048, batch_sequences=64)
    found = enumerate_layouts(work, 8, Constraints())
    return set(found.candidates.pipeline.tolist()), found.refused[LAYERS_JOINED]


def test_no_pipeline_parts_layers_that_share_keys() -> None:
    degrees, refused = enumerated(SHAPES["small"])
    assert degrees == {1} and refused > 0
    degrees, refused = enumerated(SHAPES["large"])
    assert 2 in degrees and refused == 0
    two = Layout(pipeline=2, stage_layers=(18, 17))
    with pytest.raises(PlaitError, match=r"layout\.pipeline = 2 separates layers that share keys"):
        check_layout(two, SHAPES["small"], sequence=2048, batch_sequences=8)


def test_no_axis_cuts_the_sequences_of_linear_attention() -> None:
    work = workload_of(replace(SHAPES["hybrid"], sequence=2048), sequence=2048, batch_sequences=64)
    found = enumerate_layouts(work, 8, Constraints())
    assert set(found.candidates.context.tolist()) == {1} and found.refused[STATES_PASS_ON] > 0
    assert {1, 2, 4, 8} == set(found.candidates.tensor.tolist()) == set(found.candidates.pipeline.tolist())
    for layout, sentence in (
        (
            Layout(context=2),
            r"layout\.context = 2 cuts sequences, and the states of this model's linear attention pass",
        ),
        (
            Layout(tensor=8),
            r"layout\.tensor = 8 does not divide the 4 key heads of linear attention; choose one of 1, 2",
        ),
    ):
        assert SHAPES["hybrid"].delta is not None
        few = replace(SHAPES["hybrid"].delta, key_heads=4)
        with pytest.raises(PlaitError, match=sentence):
            check_layout(layout, replace(SHAPES["hybrid"], delta=few), sequence=2048, batch_sequences=8)
