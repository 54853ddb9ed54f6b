"""The catalogue: every entry reads, names find what people mean, the driver's names too, figures are physical."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from plait.errors import PlaitError
from plait.machines import catalog
from plait.machines.catalog import (
    Device,
    device_names,
    find_device,
    find_device_by_driver_name,
    find_instance,
    find_link,
    link_at_rate,
    link_names,
)

DEVICES = [find_device(name) for name in device_names()]
INSTANCES = tomllib.loads((Path(catalog.__file__).parent / "catalog.toml").read_text())["instance"]


@pytest.mark.parametrize("known", DEVICES, ids=lambda known: known.name)
def test_every_device_is_whole_and_physical(known: Device) -> None:
    assert known.source
    assert find_link(known.inside).source and find_link(known.between).source
    best = max(known.peak_flops.values())
    assert 1e11 < best < 1e17
    assert known.achievable is None or 0.3 < known.achievable < 1.1
    # A program must do between 5 and 1000 operations a byte to be busy: a slip of a unit falls outside.
    assert 5 < best / known.memory_bytes_per_s < 3000
    # All of the memory is read in 5 ms to 2.5 s.
    assert 0.005 < known.memory_bytes / known.memory_bytes_per_s < 2.5
    assert known.price_per_hour is None or 0.1 < known.price_per_hour < 20
    assert known.watts is None or 20 < known.watts < 2000


@pytest.mark.parametrize("name", link_names())
def test_every_link_is_whole_and_physical(name: str) -> None:
    known = find_link(name)
    assert known.source and 1e7 < known.bytes_per_s < 1e12 and 1e-7 < known.latency_s < 1e-3
    assert 0.1 < known.reached <= 1 and known.reached <= known.all_reduce_reached < 1.2
    assert (known.axes > 1) == (known.shape == "torus")


def test_figures_of_the_most_used_devices() -> None:
    h100, a100 = find_device("H100"), find_device("A100")
    assert (h100.flops("bf16"), h100.flops("fp8"), h100.per_node) == (989.4e12, 1979e12, 8)
    assert (a100.memory_bytes_per_s, a100.achievable, a100.units) == (2.04e12, 0.869, 108)
    assert find_link(h100.inside).bytes_per_s == 450e9
    assert find_device("GB200").per_node == 72
    assert 79 * 2**30 < h100.memory_bytes < 80 * 2**30
    assert (
        find_device("macbook").vendor == "Apple"
        and find_device("laptop").kind == "cpu"
        and find_device("v5p").kind == "tpu"
    )


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("h100", "H100 SXM"),
        ("H100-SXM5-80GB (DGX H100)", "H100 SXM"),
        ("H100 96GB HBM2e 2.4TB/s 500W (Grand Teton)", "H100 SXM 96GB"),
        ("H100-PCIe-80GB", "H100 PCIe"),
        ("a100", "A100 SXM 80GB"),
        ("A100-40GB", "A100 SXM 40GB"),
        ("A100-SXM4 (80GB assumed)", "A100 SXM 80GB"),
        ("V100-SXM3 (DGX-2)", "V100 SXM2"),
        ("v100 32GB", "V100 SXM2 32GB"),
        ("GB200 NVL72 (186GB)", "GB200 NVL72"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("3080ti", "RTX 3080 Ti"),
        ("TPUv5p", "TPU v5p"),
        ("TPU v3-256", "TPU v3"),
        ("TPU v6e (Trillium)", "TPU v6e"),
        ("Apple M3 Max 64GB", "Apple M3 Max 64GB"),
        ("mi250x", "MI250X GCD"),
        ("A100-40G", "A100 SXM 40GB"),
        ("A100 80G", "A100 SXM 80GB"),
        ("RTX A5000", "RTX A5000"),
        ("3060", "RTX 3060"),
        ("3070 Ti", "RTX 3070 Ti"),
        ("RTX 4060", "RTX 4060"),
        ("GH200 144GB", "GH200 144GB"),
        ("MI350X", "MI350X"),
    ],
)
def test_a_name_finds_what_people_mean(said: str, meant: str) -> None:
    assert find_device(said).name == meant


@pytest.mark.parametrize("known", DEVICES, ids=lambda known: known.name)
def test_every_device_is_found_again_by_its_own_name(known: Device) -> None:
    assert find_device(known.name) == known


@pytest.mark.parametrize(
    ("driver", "meant"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("Tesla V100-SXM2-32GB", "V100 SXM2 32GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA GeForce RTX 3080 Ti", "RTX 3080 Ti"),
        ("NVIDIA GeForce RTX 3080", "RTX 3080"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 D", "RTX 4090 D"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090 Laptop"),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", "RTX 4060 Laptop"),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", "RTX 5090 Laptop"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX 2080 Ti"),
        ("NVIDIA TITAN RTX", "Titan RTX"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA B200", "B200 SXM"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 3060", "RTX 3060"),
        ("NVIDIA GeForce RTX 3060 Ti", "RTX 3060 Ti"),
        ("NVIDIA GeForce RTX 3070", "RTX 3070"),
        ("NVIDIA GeForce RTX 4060", "RTX 4060"),
        ("NVIDIA GeForce RTX 4060 Ti", "RTX 4060 Ti"),
        ("NVIDIA A40", "A40"),
        ("NVIDIA A30", "A30"),
        ("NVIDIA RTX A5000", "RTX A5000"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GB10", "GB10"),
        ("AMD Instinct MI210", "MI210"),
        ("AMD Instinct MI350X", "MI350X"),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "H100 SXM"),
    ],
)
def test_a_driver_s_name_finds_its_device(driver: str, meant: str) -> None:
    known = find_device_by_driver_name(driver)
    assert known is not None and known.name == meant


def test_a_laptop_s_gpu_is_not_the_desktop_s_of_the_same_number() -> None:
    assert find_device_by_driver_name("NVIDIA GeForce RTX 3080 Laptop GPU") is None
    small, large = find_device("4090 laptop"), find_device("4090")
    assert small.flops("bf16") < 0.5 * large.flops("bf16") and small.memory_bytes < large.memory_bytes


@pytest.mark.parametrize(
    ("gpu", "profile", "units", "eighths"),
    [
        # As `nvidia-smi mig -lgip` and NVIDIA's "MIG User Guide" list them.
        ("A100-SXM4-40GB", "1g.5gb", 14, 1),
        ("A100-SXM4-40GB", "2g.10gb", 28, 2),
        ("A100-SXM4-40GB", "3g.20gb", 42, 4),
        ("A100-SXM4-80GB", "7g.80gb", 98, 8),
        ("H100 80GB HBM3", "1g.10gb", 16, 1),
        ("H100 80GB HBM3", "1g.20gb", 26, 2),
        ("H100 80GB HBM3", "3g.40gb", 60, 4),
        ("H100 80GB HBM3", "7g.80gb", 132, 8),
        ("H200", "4g.71gb", 64, 4),
        ("B200", "3g.90gb", 63, 4),
        ("B200", "7g.180gb", 148, 8),
        ("RTX PRO 6000 Blackwell Server Edition", "1g.24gb", 47, 2),
        ("A30", "1g.6gb", 14, 2),
        ("A30", "2g.12gb", 28, 4),
    ],
)
def test_a_mig_slice_has_its_own_units_and_eighths_of_the_memory(
    gpu: str, profile: str, units: int, eighths: int
) -> None:
    whole, part = (find_device_by_driver_name(f"NVIDIA {gpu}{mig}") for mig in ("", f" MIG {profile}"))
    assert whole and part and whole.units and part.units == units
    assert part.flops("bf16") == pytest.approx(whole.flops("bf16") * units / whole.units, rel=0.01)
    assert part.memory_bytes == round(whole.memory_bytes * eighths / 8)
    assert part.memory_bytes_per_s == whole.memory_bytes_per_s * eighths / 8


@pytest.mark.parametrize(
    ("name", "clock_ghz"),
    [("4060 laptop", 2.37), ("4070 laptop", 2.175), ("4080 laptop", 2.28), ("4090 laptop", 2.04), ("4090 d", 2.52),
     ("4060", 2.46), ("4060 ti", 2.535), ("3060", 1.777), ("3060 ti", 1.665), ("3070", 1.725), ("3070 ti", 1.77)],
)  # fmt: skip
def test_a_game_card_s_rates_are_its_units_at_the_highest_clock(name: str, clock_ghz: float) -> None:
    """Clocks as NVIDIA lists them; a unit of Ada or Ampere makes 256 float32 operations a clock and 512 of bf16."""
    known = find_device(name)
    assert known.units
    assert known.flops("float32") == pytest.approx(known.units * 256 * clock_ghz * 1e9, rel=0.005)
    assert known.flops("bf16") == pytest.approx(2 * known.flops("float32"), rel=0.005)


@pytest.mark.parametrize(
    ("name", "units", "bf16_a_clock", "clock_ghz"),
    [
        # Operations of bf16 a clock and unit: 1024 of Ampere's professional cards, 2048 of A100's kind, 4096 of CDNA 4.
        ("A40", 84, 1024, 1.74),
        ("RTX A5000", 64, 1024, 1.695),
        ("A30", 56, 2048, 1.44),
        ("MI210", 104, 1024, 1.7),
        ("MI350X", 256, 4096, 2.2),
        ("MI355X", 256, 4096, 2.4),
    ],
)
def test_a_server_card_s_rate_is_its_units_at_the_highest_clock(
    name: str, units: int, bf16_a_clock: int, clock_ghz: float
) -> None:
    known = find_device(name)
    assert known.units == units
    assert known.flops("bf16") == pytest.approx(units * bf16_a_clock * clock_ghz * 1e9, rel=0.01)


@pytest.mark.parametrize("name", INSTANCES)
def test_every_instance_names_a_device_and_a_network(name: str) -> None:
    known = find_instance(name)
    assert known and known.source and 0 < known.devices <= known.device.per_node
    assert known.between.startswith("@") or find_link(known.between)


def test_h200_nvl_is_slower_than_h200() -> None:
    assert find_device("H200 NVL").flops("bf16") == 835.5e12


def test_a_device_that_no_driver_entry_fits_is_none() -> None:
    assert find_device_by_driver_name("Matrox G400") is None


def test_another_size_of_memory_has_that_memory_and_no_price() -> None:
    small, large = find_device("V100"), find_device("V100-32GB")
    assert large.memory_bytes == 2 * small.memory_bytes and small.price_per_hour and large.price_per_hour is None


def test_what_is_unknown_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(PlaitError, match=r'"H1000" is not a device of the catalogue; the nearest are H100 SXM'):
        find_device("H1000")
    with pytest.raises(PlaitError, match=r"no A100 SXM has 64 GB; the catalogue knows 40 and 80 GB"):
        find_device("A100-64GB")
    with pytest.raises(PlaitError, match=r"nearest names are nvlink4"):
        find_link("nvlnk4")
    with pytest.raises(PlaitError, match=r"no bf16 arithmetic of V100 SXM2; choose one of fp16, float32"):
        find_device("V100").flops("bf16")


def test_contradictions_are_refused() -> None:
    with pytest.raises(PlaitError, match=r"bytes_per_s = -1 cannot be"):
        replace(find_link("nvlink4"), bytes_per_s=-1)
    with pytest.raises(PlaitError, match=r"latency_s = -1 is before"):
        replace(find_link("nvlink4"), latency_s=-1)
    with pytest.raises(PlaitError, match=r"memory_bytes = 0 cannot be"):
        replace(find_device("H100"), memory_bytes=0)
    with pytest.raises(PlaitError, match=r"peak_flops of bf16 = 0 cannot be"):
        replace(find_device("H100"), peak_flops={"bf16": 0.0})


def test_a_network_of_any_rate_takes_after_its_nearest_known_one() -> None:
    assert link_at_rate(400, "device") == find_link("roce-400g")
    odd = link_at_rate(7, "machine")
    assert odd.bytes_per_s == 7e9 / 8 and odd.shape == "shared" and odd.latency_s == find_link("ethernet-5g").latency_s
