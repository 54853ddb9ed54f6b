"""A probe times layers as the run has them: compiled where it compiles, and never while a clock runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch._functorch.config as functorch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.model.attention import Attend, Documents, cumulative_lengths, of_any_length
from plait.model.gpt import Layer
from plait.model.sizes import explicit_shape
from plait.probing import arithmetic
from plait.probing.request import ProbeRequest, model_probe_request
from tests.counted_graphs import CountedGraphs
from tests.matrix import few_fast

SHAPE = explicit_shape(layers=2, width=32, vocabulary=64, sequence=16)
REQUEST = model_probe_request(SHAPE, sequence=16, sequences=4, device="cpu", precision="bf16", threads=1)
CPU = torch.device("cpu")


def attend_rows(q_bthd: Tensor, k_bthd: Tensor, v_bthd: Tensor, documents: Documents | None, window: int) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_bthd, k_bthd, v_bthd))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


@pytest.fixture(autouse=True)
def no_graphs_from_before() -> Iterator[None]:
    torch._dynamo.reset()
    with functorch.patch(donated_buffer=True):  # a probe's own process changes it for good
        yield
    torch._dynamo.reset()


def attend_with_ends(
    q_bthd: Tensor, k_bthd: Tensor, v_bthd: Tensor, documents: Documents | None, window: int
) -> Tensor:
    """As GPUs do, whose graphs know the number of documents as a symbol: torch then compiles the backward at once."""
    assert documents is not None and documents.ends is not None
    return attend_rows(q_bthd, k_bthd, v_bthd, documents, window) * documents.ends.shape[0]


@pytest.mark.parametrize("attend", few_fast([attend_rows, attend_with_ends], attend_with_ends))
def test_a_layer_is_compiled_before_it_is_timed_and_its_backward_can_be_repeated(
    attend: Attend, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, request = CountedGraphs(), replace(REQUEST, compile="blocks")

    def on_a_gpu(documents: Documents, device: torch.device, *, longest: int, positions_bt: torch.Tensor) -> Documents:
        ends = of_any_length(cumulative_lengths(documents.lengths))
        return Documents(documents.lengths, ends, longest, positions_bt)

    monkeypatch.setattr(Documents, "on", on_a_gpu)
    monkeypatch.setattr(arithmetic, "attention_runs", lambda *_: {})  # its kernel is a GPU's

    def prepare(layer: nn.Module) -> None:
        assert isinstance(layer, Layer)
        layer.attention.attend = attend  # on a processor plait's own asks for the library, outside of a graph
        layer.compile(dynamic=False, fullgraph=True, backend=graphs)

    monkeypatch.setattr(arithmetic, "compile_layer", prepare)
    runs = arithmetic.arithmetic_runs(request, CPU)
    before = graphs.count
    assert before == len(request.models)
    for (work, _), run in runs.items():
        if work in ("layer", "layer_backward"):
            run()
            run()
    assert graphs.count == before


def test_the_request_says_whether_layers_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, prepared = replace(REQUEST, compile="blocks"), list[nn.Module]()
    assert ProbeRequest.from_json(compiled.to_json()) == compiled != REQUEST
    monkeypatch.setattr(arithmetic, "compile_layer", prepared.append)
    arithmetic.arithmetic_runs(REQUEST, CPU)
    assert not prepared
    arithmetic.arithmetic_runs(compiled, CPU)
    assert len(prepared) == len(compiled.models)
