"""What a sample prints, piece by piece."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from plait.commands.models.opened_model import device_to_sample_on
from plait.commands.sample import decode_incrementally
from plait.machines.requested_workers import RequestedDevices


class Words:
    """A tokenizer that drops the space with which a text begins, as SentencePiece's do."""

    eot = 0
    words = ("", " Once", " upon", " a", " time", ",")

    def decode(self, ids: list[int]) -> str:
        return "".join(self.words[one] for one in ids).removeprefix(" ")


@pytest.mark.parametrize(("before", "text"), [([1, 2], " a time, Once"), ([], "a time, Once")])
def test_words_keep_the_spaces_between_them(before: list[int], text: str) -> None:
    told = list(decode_incrementally(cast(Any, Words()), before, iter([3, 4, 5, 1, 0, 2])))
    assert "".join(told) == text and len(told) == 4


@pytest.mark.parametrize(
    ("requested", "present", "device"),
    [("auto", 2, "cuda:0"), ("auto", 0, "cpu"), ("cpu", 2, "cpu"), ((1, 0), 2, "cuda:1"), ((3,), 2, "cuda:0")],
)
def test_a_model_speaks_on_the_devices_of_its_run(requested: RequestedDevices, present: int, device: str) -> None:
    assert device_to_sample_on(requested, "cuda" if present else None, present) == torch.device(device)
