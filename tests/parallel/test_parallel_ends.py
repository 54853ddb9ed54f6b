"""Does the rank that keeps a tied weight have its whole gradient, and the other one every row that it looks up?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from plait.launch.values.job import Job
from plait.parallel.tied_embedding import rows_first_used
from tests.matrix import few_fast
from tests.parallel.ends_entries import RATE, STEPS, embedded, first_table, headed, tokens_of
from tests.shared_ranks import RanksOf


@pytest.mark.parametrize("micros", few_fast([4, 1], 4))
def test_one_end_keeps_the_weight(tmp_path: Path, micros: int) -> None:
    asked = {"folder": str(tmp_path), "micros": micros}
    job = Job(entry="meet", argument=json.dumps(asked), world_size=2, threads=1)
    server = RanksOf("tests.parallel.ends_entries")
    server.run(job, on_message=lambda _: None)
    embedding, head = (load_file(tmp_path / f"rank-{rank}.safetensors") for rank in range(2))
    wanted, table = _in_one_process(micros)
    for step in range(STEPS):
        assert torch.equal(embedding[f"loss-{step}"], wanted[f"embedded-{step}"]), "a row was not the current one"
        assert torch.equal(head[f"gradient-{step}"], wanted[f"gradient-{step}"])
    assert torch.equal(embedding["look"], embedded(table, tokens_of(STEPS, 0)))
    assert torch.equal(head["after"], table)
    assert not torch.equal(embedding["before"], table), "nothing was left to be settled"
    assert torch.equal(embedding["after"], table)


def _in_one_process(micros: int) -> tuple[dict[str, Tensor], Tensor]:
    """The same steps with one weight: what its two uses give it is added up apart, and then together.

    In one thread, as ranks: on some processors more of them give other bits.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _steps(micros)
    finally:
        torch.set_num_threads(threads)


def _steps(micros: int) -> tuple[dict[str, Tensor], Tensor]:
    table, found = first_table(), dict[str, Tensor]()
    for step in range(STEPS):
        sums = []
        for name in ("headed", "embedded"):
            parameter = nn.Parameter(table)
            losses = [
                headed(parameter, step, micro) if name == "headed" else embedded(parameter, tokens_of(step, micro))
                for micro in range(micros)
            ]
            for loss in losses:
                loss.backward()
            found[f"{name}-{step}"] = torch.stack([loss.detach() for loss in losses])
            assert parameter.grad is not None
            sums.append(parameter.grad)
        found[f"gradient-{step}"] = sums[0] + sums[1]
        table = table - RATE * found[f"gradient-{step}"]
    return found, table


def test_rows_travel_with_the_first_micro_batch_that_has_them() -> None:
    tokens = [torch.tensor([[5, 3, 3]]), torch.tensor([[3, 9]]), torch.tensor([[7, 5, 9, 4]])]
    assert [rows.tolist() for rows in rows_first_used(tokens, 3, 5)] == [[0, 2], [], [1, 4]]
