"""Measured times carried over to other sizes: exact where they were measured, careful where they were not."""

from __future__ import annotations

import numpy as np
import pytest

from plait.errors import PlaitError
from plait.machines.measured import MeasuredDevice
from plait.model.shape import parameter_count
from plait.model.sizes import named_shape
from plait.planner.step_time import measured_compute
from plait.probing.request import ProbedModel, layer_products
from tests.probing.probed import device, link, measured, point, timed
from tests.probing.step_items import step_items_s

SHAPES = ((64, 320, 320), (256, 320, 896), (1024, 320, 320), (4096, 320, 896), (1024, 1024, 1024))
RATES = (60e9, 90e9, 150e9, 140e9, 130e9)


def flops(sizes: tuple[int, ...]) -> float:
    return 2.0 * sizes[0] * sizes[1] * sizes[2]


def products() -> MeasuredDevice:
    return device(
        *(timed("product", sizes, flops(sizes) / rate) for sizes, rate in zip(SHAPES, RATES, strict=True)),
        timed("launch", (), 5e-6),
    )


def test_a_measured_product_takes_what_it_took() -> None:
    for sizes, rate in zip(SHAPES, RATES, strict=True):
        assert measured_compute.measured_product_s(products(), *sizes) == pytest.approx(flops(sizes) / rate, rel=1e-3)


def test_no_product_is_faster_than_the_best_nor_slower_than_the_worst_measured() -> None:
    random = np.random.default_rng(1)
    rows, inner, columns = 2.0 ** random.uniform(5, 15, (3, 500))
    rates = 2 * rows * inner * columns / measured_compute.measured_product_s(products(), rows, inner, columns)
    assert rates.max() <= max(RATES) * (1 + 1e-9)
    large = 2 * rows * inner * columns > 5e-6 * max(RATES)
    assert rates[large].min() >= min(RATES) * (1 - 1e-9)


def test_between_two_shapes_the_nearer_one_counts_more() -> None:
    rate = flops((100, 320, 340)) / measured_compute.measured_product_s(products(), 100, 320, 340)
    assert 60e9 < rate < 90e9
    assert rate < flops((200, 320, 800)) / measured_compute.measured_product_s(products(), 200, 320, 800)


def test_beyond_the_measured_the_rate_holds() -> None:
    once, larger = (
        measured_compute.measured_product_s(products(), 4096, 320, 896),
        measured_compute.measured_product_s(products(), 65536, 320, 896),
    )
    assert larger == pytest.approx(16 * once, rel=1e-6)


def test_the_smallest_product_takes_a_launch() -> None:
    assert measured_compute.measured_product_s(products(), 1, 1, 1) == pytest.approx(5e-6)


def test_the_three_forms_are_told_apart() -> None:
    sizes = (256, 256, 256)
    one = device(
        timed("product", sizes, 1e-3), timed("product_input", sizes, 2e-3), timed("product_weight", sizes, 3e-3)
    )
    found = [
        float(measured_compute.measured_product_s(one, *sizes, form=form)) for form in ("forward", "input", "weight")
    ]
    assert found == pytest.approx([1e-3, 2e-3, 3e-3], rel=1e-6)


def test_answers_have_the_shape_of_what_was_asked() -> None:
    rows = np.array([[64.0], [4096.0]])
    assert measured_compute.measured_product_s(products(), rows, np.array([320, 640, 1280]), 320).shape == (2, 3)
    assert measured_compute.stream_s(products(), rows, 320, 896, "forward").shape == (2, 1)


def test_attention_grows_with_heads_and_sequences_and_the_square_of_the_length() -> None:
    one = device(timed("attention", (16, 256, 10, 10, 32), 16 * 10 * 1e-4))
    assert measured_compute.attention_s(one, 16, 256, 10, 32, "forward") == pytest.approx(16e-3, rel=1e-6)
    assert measured_compute.attention_s(one, 1, 256, 5, 32, "forward") == pytest.approx(5e-4, rel=1e-6)
    assert measured_compute.attention_s(one, 1, 512, 1, 32, "forward") == pytest.approx(4e-4, rel=1e-6)


def test_the_step_of_a_measured_model_is_the_sum_of_its_parts() -> None:
    """Each item of a model whose own shapes were measured, recovered; two micro-batches take twice, but one update."""
    shape = named_shape("11M", vocabulary=8192, sequence=256)
    scene = ProbedModel(shape=shape, sequence=256, sequences=16)
    sizes = (scene.tokens, shape.width, shape.ffn)
    forms = {(work, keys(p)[k]) for p in layer_products(scene) for k, work in enumerate(FORMS)}
    one = device(
        *(timed(work, size, 1e-2) for work, size in sorted(forms)),
        timed("attention", (16, 256, 10, 10, 32), 1e-2),
        timed("attention_backward", (16, 256, 10, 10, 32), 3e-2),
        timed("stream", sizes, 2e-2),
        timed("stream_backward", sizes, 4e-2),
        timed("head", (512, shape.width, 8192), 7e-2),
        timed("update", (1_000_000, 9), 2e-3),
        timed("accumulate", (1_000_000,), 1e-3),
    )
    found = step_items_s(one, shape, sequence=256, sequences=16)
    assert found["products"] == pytest.approx(8 * 21 * 1e-2, rel=1e-3)
    assert found["attention"] == pytest.approx(8 * 4e-2, rel=1e-6)
    assert found["stream"] == pytest.approx(8 * 6e-2, rel=1e-6)
    assert found["head"] == pytest.approx(8 * 7e-2, rel=1e-6)
    assert found["update"] == pytest.approx(2e-9 * parameter_count(shape)) and found["accumulate"] == 0
    twice = step_items_s(one, shape, sequence=256, sequences=16, n_microbatches=2)
    assert twice["products"] == pytest.approx(2 * found["products"]) and twice["update"] == found["update"]
    assert twice["accumulate"] == pytest.approx(1e-9 * parameter_count(shape))


FORMS = ("product", "product_input", "product_weight")


def keys(product: tuple[int, int, int]) -> tuple[tuple[int, int, int], ...]:
    rows, inner, columns = product
    return (rows, inner, columns), (rows, columns, inner), (columns, rows, inner)


def test_work_that_was_not_measured_is_refused() -> None:
    bare = MeasuredDevice(
        host="a",
        name="x",
        workers=1,
        threads=1,
        memory_bytes=1,
        timed=(timed("launch", (), 1e-6),),
        beside={},
        granted=1.0,
        rates=(),
    )
    with pytest.raises(PlaitError, match="head was not measured; probe again"):
        measured_compute.head_s(bare, 1, 1, 1)


def test_a_message_between_measured_sizes_and_beyond_them() -> None:
    whole = measured(link("all_reduce", point(1024, 1e-4), point(2**20, 1e-3), point(2**24, 1.6e-2)))
    assert measured_compute.measured_collective_s(whole, "all_reduce", 2**20, 2, "inside") == pytest.approx(1e-3)
    middle = measured_compute.measured_collective_s(whole, "all_reduce", 2**22, 2, "inside")
    assert middle == pytest.approx(4e-3)
    assert measured_compute.measured_collective_s(whole, "all_reduce", 2**28, 2, "inside") == pytest.approx(
        0.256, rel=0.01
    )
    assert measured_compute.measured_collective_s(whole, "all_reduce", 1, 2, "inside") == pytest.approx(1e-4)
    assert measured_compute.measured_collective_s(whole, "all_reduce", 2**20, 1, "inside") == 0


def test_a_longer_message_never_ends_sooner() -> None:
    whole = measured(link("all_reduce", point(1024, 1e-3), point(2**14, 5e-4), point(2**20, 2e-3)))
    times = measured_compute.measured_collective_s(whole, "all_reduce", 2.0 ** np.arange(10, 30), 2, "inside")
    assert (np.diff(times) >= -1e-12).all()


def test_more_ranks_than_measured_take_a_rings_share_and_its_latencies() -> None:
    whole = measured(link("all_reduce", point(1024, 1e-4), point(2**24, 1.01e-2)))
    four = measured_compute.measured_collective_s(whole, "all_reduce", 2**24, 4, "inside")
    assert four == pytest.approx(3e-4 + 1e-2 * 1.5)
    assert measured_compute.measured_collective_s(whole, "all_reduce", 2**24, np.array([1, 2]), "inside").tolist() == [
        0.0,
        pytest.approx(1.01e-2),
    ]


def test_the_link_with_the_nearest_number_of_ranks_answers_and_the_slowest_of_several() -> None:
    whole = measured(
        link("all_reduce", point(1024, 1e-4)),
        link("all_reduce", point(1024, 7e-4), ranks=8),
        link("send", point(1024, 1e-3), scope="between"),
        link("send", point(1024, 5e-3), scope="between"),
    )
    assert measured_compute.measured_collective_s(whole, "all_reduce", 1024, 8, "inside") == pytest.approx(7e-4)
    assert measured_compute.measured_collective_s(whole, "all_reduce", 1024, 2, "inside") == pytest.approx(1e-4)
    assert measured_compute.measured_collective_s(whole, "send", 1024, 2, "between") == pytest.approx(5e-3)


def test_the_librarys_operations_stand_for_plaits_own_where_those_were_not_measured() -> None:
    whole = measured(link("reduce_scatter", point(1024, 3e-4)))
    assert measured_compute.measured_collective_s(whole, "swap_parts", 1024, 2, "inside") == pytest.approx(3e-4)
    with pytest.raises(PlaitError, match="all_to_all between hosts was not measured; probe again"):
        measured_compute.measured_collective_s(whole, "all_to_all", 1024, 2, "between")


def test_what_hides() -> None:
    whole = measured()
    assert (
        measured_compute.measured_overlap(whole, "inside") == pytest.approx(0.6)
        and measured_compute.measured_overlap(whole, "between") == 0
    )
