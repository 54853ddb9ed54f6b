"""Pools: what pool.toml and short forms mean, what stands in for what is left out, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.errors import PlaitError
from plait.machines.catalog import device_names, find_device
from plait.machines.pool import ASSUMED_BANDWIDTH, ONLY_ZONE, Pool, pool_from_toml, pool_of_short_form, read_pool

A100 = '[[device]]\nname = "A100-40GB"\ncount = 8\nzone = "a"\n'
V100 = '[[device]]\nname = "V100"\ncount = 16\nzone = "b"\n'
LINK = '[[link]]\nfrom = "a"\nto = "b"\n'


def pool(text: str) -> Pool:
    return pool_from_toml(text.encode(), "pool.toml")


def test_all_values_are_read() -> None:
    one = pool(
        'currency = "EUR"\n[[device]]\nname = "A100-40GB"\ncount = 8\nper_node = 4\nzone = "a"\nprice = 2\n'
        'spot_price = 1.0\ninterruptions_per_day = 0.5\n[[device]]\nname = "T4"\ncount = 2\nzone = "b"\nprice = 0.5\n'
        '[[link]]\nfrom = "b"\nto = "a"\nbandwidth = "100G"\negress_price = 0.03\n'
    )
    first, second = one.devices
    assert (first.count, first.per_node, first.price, first.spot_price, first.interruptions_per_day) == (
        8,
        4,
        2,
        1,
        0.5,
    )
    assert (first.assumed, first.spot_assumed) == ((), ())
    assert second.assumed == ("nodes of 2 T4",)
    link = one.link_between("a", "b")
    assert link and link.egress_price == 0.03 and link.link.bytes_per_s == 12.5e9 and link.link.shape == "shared"
    assert one.zones == ("a", "b") and one.currency == "EUR" and one.link_between("a", "a") is None


def test_a_measured_bandwidth_is_reached_whole() -> None:
    link = pool(A100 + V100 + LINK + "bandwidth = 1.2e9\n").link_between("a", "b")
    assert link and link.link.bytes_per_s * link.link.reached == 1.2e9


def test_what_is_left_out_is_assumed_and_named() -> None:
    one = pool(A100 + V100)
    first = one.devices[0]
    assert first.price == find_device("A100-40GB").price_per_hour
    assert any("AWS on demand, us-east-1, 2026-11-09" in phrase for phrase in first.assumed)
    link = one.link_between("a", "b")
    assert link and link.link.bytes_per_s == ASSUMED_BANDWIDTH
    assert [phrase.split()[0] for phrase in link.assumed] == ["1.2", "$0.02"]


def test_a_short_form_is_a_pool_of_one_zone() -> None:
    one = pool_of_short_form("128xA100-40GB+384xV100+400G")
    assert [(entry.device.name, entry.count, entry.zone) for entry in one.devices] == [
        ("A100 SXM 40GB", 128, ONLY_ZONE),
        ("V100 SXM2", 384, ONLY_ZONE),
    ]
    link = one.link_between(ONLY_ZONE, ONLY_ZONE)
    assert link and link.link.bytes_per_s == 50e9 and link.egress_price == 0


def test_sizes_are_parts_of_one_node_and_whole_nodes() -> None:
    assert pool('[[device]]\nname = "T4"\ncount = 12\nper_node = 4\n').devices[0].sizes == (1, 2, 4, 8, 12)
    assert pool('[[device]]\nname = "server"\ncount = 3\n').devices[0].sizes == (1, 2, 3)


@pytest.mark.parametrize("name", device_names())
def test_every_price_of_the_catalogue_has_a_source(name: str) -> None:
    device = find_device(name)
    assert bool(device.price_source) == (device.price_per_hour is not None)


BAD = {
    "": "device missing",
    "device = 3": "write [[device]] before each",
    "currency = 'gold'\n" + A100: 'write one such as "USD"',
    "[[device]]\nname = 'A100-40GB'\ncount = -4": "count = -4 is not a number of devices",
    "[[device]]\nname = 'A100-40GB'\ncount = 0": "count = 0 is not a number of devices",
    "[[device]]\nname = 'A100-40GB'\ncount = true": "count = True is not",
    "[[device]]\nname = 'A100-40GB'\ncount = 9\nper_node = 4": "write count = 8 or another per_node",
    "[[device]]\nname = 'A100-40GB'\ncount = 16\nper_node = 16": "joins 8",
    "[[device]]\nname = 'Z9'\ncount = 1": "is not a device of the catalogue",
    "[[device]]\nname = 5\ncount = 1": "name = 5 is not text",
    A100 + "price = -1": "price = -1 is out of range; write a number from 0 to 1e+09",
    A100 + "price = nan": "price = nan is out of range",
    A100 + "price = 1" + 400 * "0": "is out of range",
    A100 + "spot_price = 'cheap'": "spot_price = 'cheap' is not a number",
    A100 + "prize = 3": '"prize" is not known; write price',
    A100 + "[[device]]\nname = 'T4'\ncount = 2\nzone = ''": "zone = '' is not a name",
    A100 + V100 + '[[link]]\nfrom = "a"\nto = "c"\n': "to = 'c' is not a zone of a [[device]]; the zones are a, b",
    A100 + V100 + LINK + LINK: "two links join a and b",
    A100 + V100 + LINK + "bandwidth = 0": "bandwidth = 0 is not a rate",
    A100 + V100 + LINK + "egress_price = -0.1": "egress_price = -0.1 is out of range",
    A100 + V100 + "[[device]]\nname = 'T4'\ncount = 2\nzone = 'c'\n" + LINK: "has no [[link]] between a and c",
    "currency = 'EUR'\n" + A100 + "price = 2\n" + V100 + "price = 1\n" + LINK: "add egress_price, for one GB, in EUR",
    "[[device]]\nname = 'T4'\ncount = 900000\n" * 2: "name 1000000 or fewer",
    "[[device": "is not a pool",
    A100 * 65: "write 64 at most",
}


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_bad_pools_are_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(PlaitError) as refused:
        pool(text)
    assert BAD[text] in str(refused.value) and "\n" not in str(refused.value) and refused.value.exit_code == 2


def test_a_pool_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlaitError, match=r"cannot read the pool .*name a pool.toml that exists"):
        read_pool(tmp_path / "none.toml")
