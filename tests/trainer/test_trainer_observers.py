"""What lasts is taken out of the garbage collector's sight once, and what no longer lasts is still found."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from plait.trainer.observers import SETTLED_AFTER_STEPS, collect_all, frozen_garbage
from plait.trainer.state import TrainState


class Stage:
    """A module and its hook know each other."""

    def __init__(self) -> None:
        self.hook = lambda: self


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_after_some_steps_a_collection_visits_only_what_is_newer() -> None:
    gc.unfreeze()
    lasting, observer = Stage(), frozen_garbage()
    for step in range(1, SETTLED_AFTER_STEPS + 1):
        assert not _is_frozen(lasting), "layers are not compiled yet"
        observer.after_step(TrainState(step=step))
    assert _is_frozen(lasting)
    newer = Stage()
    observer.after_step(TrainState(step=SETTLED_AFTER_STEPS + 1))
    assert not _is_frozen(newer)
    seen = weakref.ref(newer)
    del newer
    gc.collect()
    assert seen() is None, "garbage of later steps is collected as ever"


def test_a_stage_that_has_moved_away_is_freed_although_it_was_frozen() -> None:
    old = Stage()
    collect_all()
    assert _is_frozen(old)
    seen = weakref.ref(old)
    del old
    gc.collect()
    assert seen() is not None, "else this test shows nothing"
    collect_all()
    assert seen() is None


def _is_frozen(one: object) -> bool:
    return not any(each is one for each in gc.get_objects())
