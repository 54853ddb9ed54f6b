"""All kinds of programs that are compared with plain torch, by name."""

from __future__ import annotations

from tests.custom.kind import Kind
from tests.custom.kinds_basic import BASIC
from tests.custom.kinds_models import MODELS
from tests.custom.kinds_practice import PRACTICE
from tests.custom.kinds_training import TRAINING

KINDS: dict[str, Kind] = {**BASIC, **MODELS, **TRAINING, **PRACTICE}
