"""Clusters in a few characters, as a cluster.json, and the machine at hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from plait.errors import PlaitError
from plait.machines.catalog import device_names, find_device, find_link
from plait.machines.cluster import (
    Cluster,
    Island,
    cluster_from_json,
    cluster_json,
    cluster_of_machine,
    device_bytes_per_s,
    read_cluster,
)
from plait.machines.machine import Machine


@pytest.mark.parametrize(
    ("text", "islands", "between"),
    [
        ("512xH100", [("H100 SXM", 64, 8)], "infiniband-ndr"),
        ("2x(8xA100)+400G", [("A100 SXM 80GB", 2, 8)], "roce-400g"),
        ("macbook+4090@1G", [("Apple M4", 1, 1), ("RTX 4090", 1, 1)], "ethernet-1g"),
        ("8xV100", [("V100 SXM2", 1, 8)], "infiniband-edr-shared-by-two"),
        ("256xTPUv5p", [("TPU v5p", 1, 256)], "dcn-4-chips"),
        ("512xTPUv5e", [("TPU v5e", 2, 256)], "dcn-8-chips"),
        ("72xGB200", [("GB200 NVL72", 1, 72)], "infiniband-ndr"),
        ("128xgb200", [("GB200 NVL72", 2, 64)], "infiniband-ndr"),
        ("16384 x H100", [("H100 SXM", 2048, 8)], "infiniband-ndr"),
        ("4x(8xH100) + 2x(8xA100-40GB) + efa", [("H100 SXM", 4, 8), ("A100 SXM 40GB", 2, 8)], "efa"),
        ("2x4090", [("RTX 4090", 1, 2)], "ethernet-1g"),
        ("2xRTX 4090", [("RTX 4090", 1, 2)], "ethernet-1g"),
        ("RTX 4090 x 2", [("RTX 4090", 1, 2)], "ethernet-1g"),
        ("RTX 3060+T4@10G", [("RTX 3060", 1, 1), ("T4", 1, 1)], "ethernet-10g"),
        ("2xlaptop", [("laptop processor", 2, 1)], "ethernet-1g"),
        ("3x(2x3090)@2.5G", [("RTX 3090", 3, 2)], "ethernet-2.5g"),
        ("H100+8xA100", [("H100 SXM", 1, 1), ("A100 SXM 80GB", 1, 8)], "infiniband-hdr"),
        ("H100x8", [("H100 SXM", 1, 8)], "infiniband-ndr"),
        ("4 x H100x8", [("H100 SXM", 4, 8)], "infiniband-ndr"),
        ("64xA100-40G", [("A100 SXM 40GB", 8, 8)], "infiniband-hdr"),
        ("8xA100-80G", [("A100 SXM 80GB", 1, 8)], "infiniband-hdr"),
        ("DGX H100", [("H100 SXM", 1, 8)], "infiniband-ndr"),
        ("4xHGX-A100+400G", [("A100 SXM 80GB", 4, 8)], "roce-400g"),
        ("DGX Spark", [("GB10", 1, 1)], "roce-200g"),
        ("p5.48xlarge", [("H100 SXM", 1, 8)], "efa"),
        ("2x(p4d.24xlarge)", [("A100 SXM 40GB", 2, 8)], "efa-p4d"),
        ("4xp4de.24xlarge", [("A100 SXM 80GB", 4, 8)], "efa-p4d"),
        ("2xa3-highgpu-8g", [("H100 SXM", 2, 8)], "roce-100g"),
        ("ND H100 v5", [("H100 SXM", 1, 8)], "infiniband-ndr"),
        ("8xStandard_ND96isr_H100_v5", [("H100 SXM", 8, 8)], "infiniband-ndr"),
        ("2xnc96ads_A100_v4", [("A100 PCIe 80GB", 2, 4)], "ethernet-80g"),
        ("2xp5.48xlarge+1xp4d.24xlarge", [("H100 SXM", 2, 8), ("A100 SXM 40GB", 1, 8)], "efa-p4d"),
    ],
)  # fmt: skip
def test_short_forms(text: str, islands: list[tuple[str, int, int]], between: str) -> None:
    cluster = read_cluster(text)
    assert [(i.device.name, i.nodes, i.per_node) for i in cluster.islands] == islands
    assert cluster.between.name == between and cluster.name == text
    assert cluster.n_devices == sum(nodes * per_node for _, nodes, per_node in islands)


@pytest.mark.parametrize(
    ("name", "chips", "counts"),
    [
        # Google's tables of slices: v5p 4x4x8 has 256 cores and 128 chips, v4 2x2x1 8 and 4; v5e and v6e count chips.
        ("v5p-256", 128, "TensorCores"),
        ("v5p-8", 4, "TensorCores"),
        ("TPU v4-8", 4, "TensorCores"),
        ("v3-32", 16, "TensorCores"),
        ("v6e-8", 8, "chips"),
        ("v5e-16", 16, "chips"),
        ("v5litepod-256", 256, "chips"),
    ],
)
def test_a_slice_s_name_counts_what_google_counts_and_says_so(name: str, chips: int, counts: str) -> None:
    for text, nodes in ((name, 1), (f"2x{name}", 2)):
        cluster = read_cluster(text)
        assert [(i.nodes, i.per_node) for i in cluster.islands] == [(nodes, chips)]
        [note] = cluster.notes
        assert note.startswith(f"the number in {name} counts {counts}") and ("two a chip" in note) == (
            chips != int(name.split("-")[-1])
        )


def test_two_kinds_of_machines_keep_their_own_networks() -> None:
    cluster = read_cluster("2xp5.48xlarge+2xp4d.24xlarge")
    assert [cluster.link_between_nodes(island).name for island in cluster.islands] == ["efa", "efa-p4d"]
    overruled = read_cluster("2xp5.48xlarge+2xp4d.24xlarge@10G")
    assert {overruled.link_between_nodes(island).name for island in overruled.islands} == {"ethernet-10g"}


@pytest.mark.parametrize("text", ["1x(4x4090)@10G", "4090@10G", "p5.48xlarge+400G"])
def test_a_network_that_joins_nothing_is_said_to_change_nothing(text: str) -> None:
    cluster = read_cluster(text)
    assert (
        cluster.n_nodes == 1
        and cluster.notes[-1] == f'"{text[-4:] if "@" in text else "+400G"}" changes nothing: there is one machine'
    )


def test_a_rate_is_each_device_s_after_plus_and_each_machine_s_after_at() -> None:
    cards, office = read_cluster("2x(8xA100)+100G").between, read_cluster("2x(8xA100)@100G").between
    assert device_bytes_per_s(cards, 8) == 12.5e9
    assert device_bytes_per_s(office, 8) == 12.5e9 / 8
    assert (
        read_cluster("16xH100+50GB/s").between.bytes_per_s == read_cluster("16xH100+0.4T").between.bytes_per_s == 50e9
    )
    assert device_bytes_per_s(find_link("ici-v4"), 64) == 6 * 45e9


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("12xH100", r"12 H100 SXM do not fill nodes of 8; take 8 or 16, or write the nodes, as in 3x\(4xH100 SXM\)"),
        ("2x(16xH100)", r"16 H100 SXM in a node, but nvlink4 joins 8 at most; write 4x\(8xH100\)"),
        ("0xH100", r"no devices; write a count of 1 or more"),
        ("-2xH100", r"no devices; write a count of 1 or more"),
        ("2x(0xH100)", r"no devices; write a count of 1 or more"),
        ("", r"is not a cluster; write for example 512xH100"),
        ("+400G", r"is not a cluster"),
        ("400G", r"a network without devices"),
        ("2x4090@0G", r"carries nothing; write a rate above zero"),
        ("2x4090+-1G", r"carries nothing; write a rate above zero"),
        ("2x4090@slow", r"neither a rate such as 400G nor a link"),
        ("2x4090@infiniband-nrd", r"the nearest names are infiniband-ndr"),
        ("H100@1G+A100", r"names the network before its end"),
        ("512xH1000", r"the nearest are H100 SXM"),
        ("RTX 4091", r'"RTX 4091" is not a device of the catalogue'),
        ("2x(8xH100", r"is not a device of the catalogue"),
        ("4x4090@10G", r'is one machine of 4 RTX 4090.* for 4 machines write "4x\(1xRTX 4090\)@10G"'),
        ("8xH100+400G", r'for two such machines "2x\(8xH100 SXM\)\+400G"'),
        ("v4-7", r"the number counts TensorCores \(two a chip\).* a multiple of 4"),
        ("v5e-512", r"a slice of TPU v5e has 1 to 256 chips"),
        ("tpu7x-128", r"may count chips or TensorCores.*128xTPU v7x"),
        ("2x(8xDGX H100)", r"is a whole machine.* write 16xDGX H100"),
        ("4xH100x16", r"joins 8 at most; write 8x\(8xH100\)"),
        ("64xA100-40X", r"the nearest are A100 SXM 40GB, A100 SXM 80GB"),
        ("2xp5.24xlarge", r"the nearest are p5\.4.*xlarge"),
    ],
)
def test_what_contradicts_itself_is_refused_in_one_sentence(text: str, complaint: str) -> None:
    with pytest.raises(PlaitError, match=complaint) as refused:
        read_cluster(text)
    assert "\n" not in str(refused.value)


@given(
    some.sampled_from(device_names()),
    some.integers(1, 40),
    some.integers(1, 8),
    some.sampled_from(["", "+400G", "@3G"]),
)
def test_any_cluster_of_equal_nodes_reads_back_from_its_json(name: str, nodes: int, per_node: int, end: str) -> None:
    size = min(per_node, find_device(name).per_node)
    cluster = read_cluster(f"{nodes}x({size}x{name}){end}")  # of one node the network changes nothing, and it says so
    assert cluster.n_devices == nodes * size
    assert cluster_from_json(cluster_json(cluster), "cluster.json") == cluster


def test_unequal_devices_and_links_read_back(tmp_path: Path) -> None:
    mine = replace(find_device("RTX 4090"), name="RTX 4090 48GB", memory_bytes=50 * 10**9, price_per_hour=None)
    slow = replace(find_link("ethernet-1g"), name="the long cable", bytes_per_s=1.1e8)
    cluster = Cluster(
        name="two rooms",
        islands=(
            Island(
                device=find_device("H100"),
                per_node=8,
                nodes=4,
                inside=find_link("nvlink4"),
                network=find_link("infiniband-ndr"),
            ),
            Island(device=mine, per_node=2, nodes=1, inside=find_link("pcie4"), speed=0.9),
        ),
        between=slow,
    )
    file = tmp_path / "cluster.json"
    file.write_text(cluster_json(cluster), encoding="utf-8")
    assert read_cluster(file) == read_cluster(str(file)) == cluster
    assert [cluster.link_between_nodes(island).name for island in cluster.islands] == [
        "infiniband-ndr",
        "the long cable",
    ]
    assert (cluster.n_devices, cluster.n_nodes, cluster.price_per_hour) == (34, 5, None)
    assert cluster.watts == 32 * 700 + 2 * 450


def test_a_device_like_another_differs_only_in_what_is_said() -> None:
    text = json.dumps(
        {
            "islands": [
                {"device": {"like": "H100", "name": "H100 at 500 W", "watts": 500, "memory_bytes": 8e10}, "per_node": 4}
            ],
            "between": {"like": "ethernet-10g", "bytes_per_s": 1e9},
        }
    )
    cluster = cluster_from_json(text, "my.json")
    (island,) = cluster.islands
    expected = replace(
        find_device("H100"), name="H100 at 500 W", watts=500, memory_bytes=80_000_000_000, source=island.device.source
    )
    assert island.device == expected and "my.json" in island.device.source
    assert (cluster.name, island.nodes, island.inside.name, cluster.between.bytes_per_s) == ("my", 1, "nvlink4", 1e9)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", r"is not JSON"),
        ("[]", r"must be an object, with islands"),
        ("{}", r"islands missing; add it"),
        ('{"name": null, "islands": [{"device": "H100", "per_node": 8}]}', r"name = null does not fit; write text"),
        ('{"islands": []}', r"islands must be a list of one or more"),
        ('{"islands": 3}', r"islands must be a list"),
        ('{"islands": [{"device": "H100"}]}', r"island 1: per_node missing"),
        ('{"islands": [{"device": "H100", "per_node": 8, "node": 2}]}', r'"node" is not known; write nodes'),
        ('{"islands": [{"device": "H100", "per_node": 0}]}', r"per_node = 0; write more than 0"),
        ('{"islands": [{"device": "H100", "per_node": 2.5}]}', r"per_node = 2.5 does not fit; write a whole number"),
        ('{"islands": [{"device": "H100", "per_node": true}]}', r"per_node = true does not fit"),
        ('{"islands": [{"device": "H100", "per_node": Infinity}]}', r"per_node = Infinity does not fit"),
        ('{"islands": [{"device": "H100", "per_node": 8, "speed": -1}]}', r"speed = -1; write more than 0"),
        ('{"islands": [{"device": "H99", "per_node": 8}]}', r'"H99" is not a device'),
        ('{"islands": [{"device": {"name": "mine"}, "per_node": 8}]}', r"device: .*peak_flops.* missing"),
        ('{"islands": [{"device": {"like": "H100", "kind": "abacus"}, "per_node": 8}]}', r"one of cpu, gpu, tpu"),
        ('{"islands": [{"device": "H100", "per_node": 8}], "between": {"like": "efa", "axes": -5}}', r"more than 0"),
        ('{"islands": [{"device": "H100", "per_node": 8}], "between": 7}', r"between: 7 must be an object"),
    ],
)  # fmt: skip
def test_a_cluster_json_that_cannot_be_is_refused_in_one_sentence(text: str, complaint: str) -> None:
    with pytest.raises(PlaitError, match=complaint) as refused:
        cluster_from_json(text, "cluster.json")
    assert "\n" not in str(refused.value)


def test_a_cluster_json_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlaitError, match=r"cannot read the cluster .*none.json: No such file"):
        read_cluster(tmp_path / "none.json")


def machine(**values: object) -> Machine:
    known = {"device": "cpu", "name": "Some Processor", "devices": 1, "cores": 4, "memory_bytes": 2**34, "versions": ()}
    return Machine(**{**known, **values})  # pyright: ignore[reportArgumentType]


def test_the_machine_at_hand_with_gpus() -> None:
    here = machine(device="cuda", name="NVIDIA H100 80GB HBM3", devices=4, memory_bytes=85 * 10**9)
    (island,) = cluster_of_machine(here).islands
    assert (island.per_node, island.nodes, island.inside.name) == (4, 1, "nvlink4")
    assert island.device.memory_bytes == 85 * 10**9 and island.device.flops("bf16") == 989.4e12
    with pytest.raises(PlaitError, match=r"Matrox G400 is not in plait's catalogue; describe it in a cluster.json"):
        cluster_of_machine(machine(device="cuda", name="Matrox G400"))


def test_the_machine_at_hand_without_gpus_counts_its_cores_until_it_is_measured() -> None:
    few, many = (cluster_of_machine(machine(cores=cores)).islands[0].device for cores in (2, 4))
    assert few.kind == "cpu" and many.flops("float32") == 2 * few.flops("float32")
    measured = cluster_of_machine(machine(), measured_flops=3e11).islands[0].device
    assert measured.flops("float32") == 3e11 and measured.memory_bytes == 2**34
