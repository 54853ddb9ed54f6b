"""TPU chips of machines that exist in a description only, and why torch does not see them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from plait.errors import PlaitError
from plait.machines.detect import detect_machine
from plait.machines.gpus import Gpu
from plait.machines.requested_workers import RequestedDevices, RequestedWorkers
from plait.machines.tpus import (
    PCI,
    TpuSoftware,
    check_tpu_computes,
    check_tpus_are_seen,
    find_tpu_chips,
    why_unseen,
)
from plait.parallel.tpu_slice import topology
from tests.machines.described_gpus import ON_PROCESSORS, DescribedGpus, DescribedHost

V5E, NETWORK_CARD = "0x0063", "0x0042"
WORKING = TpuSoftware(python=(3, 12), torch="2.13.0", torch_tpu="0.2.0", libtpu="0.0.50")
CHIP = Gpu(name="TPU v5e", memory_bytes=16 * 2**30, capability=(0, 0))


def host(devices: Sequence[str], handed: Sequence[str] = ()) -> DescribedHost:
    """With these devices of Google's on its PCI bus, and these files under /dev."""
    buses = {f"{PCI}/0000:00:{number:02x}.0": device for number, device in enumerate(devices)}
    files = {f"{bus}/vendor": "0x1ae0\n" for bus in buses} | {f"{bus}/device": f"{one}\n" for bus, one in buses.items()}
    return DescribedHost(files={**files, **{f"/dev/{name}": "" for name in handed}})


def test_chips_are_those_that_the_machine_or_container_was_handed() -> None:
    four = find_tpu_chips(host([V5E] * 4 + [NETWORK_CARD], ["vfio/0", "vfio/1", "vfio/2", "vfio/3", "vfio/vfio"]))
    assert (four.count, four.name, four.devices) == (4, "TPU v5e", 4)
    assert find_tpu_chips(host([V5E] * 4, ["vfio/0", "vfio/vfio"])).count == 1
    assert find_tpu_chips(host([V5E] * 4, ["accel0", "accel1"])).count == 2
    assert find_tpu_chips(host(["0x0076"] * 2, ["vfio/0", "vfio/1"])).devices == 4
    assert find_tpu_chips(host([NETWORK_CARD], ["vfio/0"])).count == 0


@pytest.mark.parametrize(
    ("software", "sentence"),
    [
        (TpuSoftware(python=(3, 11), torch="2.13.0+cpu", torch_tpu=None, libtpu=None), "needs Python 3.12 or newer"),
        (TpuSoftware(python=(3, 12), torch="2.16.1", torch_tpu="0.2.0", libtpu="1"), "torch 2.11 to 2.15, not 2.16.1"),
        (TpuSoftware(python=(3, 12), torch="2.13.0", torch_tpu=None, libtpu=None), "pip install torch_tpu"),
        (TpuSoftware(python=(3, 12), torch="2.13.0", torch_tpu="0.2.0", libtpu=None), "pip install libtpu"),
        (WORKING, "does not see them"),
    ],
)
def test_a_sentence_says_why_chips_are_not_seen(software: TpuSoftware, sentence: str) -> None:
    assert sentence in why_unseen(software)
    with pytest.raises(PlaitError, match="this machine has 2 chips of TPU v5e, and ") as raised:
        here = host([V5E] * 2, ["vfio/0", "vfio/1"])
        check_tpus_are_seen(here, software, sees_tpus=False, are_named=False)
    assert sentence in str(raised.value) and 'run.devices = "cpu"' in str(raised.value)


def test_a_tpu_that_is_named_must_be_there() -> None:
    with pytest.raises(PlaitError, match="this machine has no TPU"):
        detect_machine(RequestedWorkers(devices="tpu"), DescribedGpus(), DescribedHost())
    assert detect_machine(RequestedWorkers(), DescribedGpus(), DescribedHost()).device == "cpu"


@pytest.mark.parametrize("devices", ["auto", "tpu"])
def test_each_chip_that_torch_sees_has_a_worker(devices: RequestedDevices) -> None:
    seen = DescribedGpus(gpus=(CHIP,) * 4, kind="tpu", built=ON_PROCESSORS)
    found = detect_machine(RequestedWorkers(devices=devices), seen, DescribedHost())
    assert (found.device, found.name, found.devices) == ("tpu", "TPU v5e", 4)
    with pytest.raises(PlaitError, match="names GPUs by number, and this machine has TPU chips"):
        detect_machine(RequestedWorkers(devices=(0,)), seen, DescribedHost())


def test_a_chip_in_use_is_said_to_be() -> None:
    busy = DescribedGpus(gpus=(CHIP,), kind="tpu", sums={0: "The TPU is already in use by process with pid 7"})
    with pytest.raises(PlaitError, match=r"already in use by process with pid 7.*one program at a time"):
        check_tpu_computes(busy, 0)
    check_tpu_computes(DescribedGpus(gpus=(CHIP,), kind="tpu"), 0)


def test_workers_must_make_a_rectangle_of_chips() -> None:
    assert topology(8, 8, "TPU v5e") == "2,4,1"
    assert topology(8, 8, "TPU v5p") == "2,2,2"
    with pytest.raises(
        PlaitError, match=r"3 workers do not form a rectangle of TPU v5e chips; write run\.workers = 1 or 4 or 8"
    ):
        topology(3, 3, "TPU v5e")
    with pytest.raises(PlaitError, match="set TORCH_TPU_TOPOLOGY"):
        topology(16, 4, "TPU v5e")
