"""What tells a model from every other: a fingerprint of its shape and of some bytes of each of its weights."""

from __future__ import annotations

import json
import os
from hashlib import sha256
from math import prod

from plait.errors import PlaitError
from plait.interop.base_model import BaseModel
from plait.interop.tensor_files import ITEM_SIZES, StoredTensor
from plait.regular_file import open_regular_file

SAMPLED_BYTES = 4096
"""Bytes of each weight that are read, from its middle. Training changes nearly every number of every weight, so that
they tell two models apart, and a model of a hundred gigabytes in a second."""


def base_fingerprint(base: BaseModel) -> str:
    """The fingerprint of a model, regardless of its folder. Raises PlaitError where a file cannot be read."""
    digest = sha256(json.dumps(base.shape.to_dict(), sort_keys=True).encode())
    stored = {place.stored.name: place.stored for place in base.places.values()}
    for name in sorted(stored):
        digest.update(json.dumps([name, stored[name].dtype, stored[name].shape]).encode())
        digest.update(_middle(stored[name]))
    return digest.hexdigest()


def _middle(stored: StoredTensor) -> bytes:
    size = prod(stored.shape) * ITEM_SIZES[stored.dtype]
    try:
        with open_regular_file(stored.file) as file:
            return os.pread(file.fileno(), min(size, SAMPLED_BYTES), stored.begin + max(0, size - SAMPLED_BYTES) // 2)
    except OSError as error:
        raise PlaitError(f"{stored.file} can no longer be read ({error.strerror}); was it moved?") from None
