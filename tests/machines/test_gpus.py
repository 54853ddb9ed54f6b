"""GPUs that cannot be used: one sentence that says what to do, before anything is planned; and no word where all is
well."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from plait.errors import PlaitError
from plait.machines.detect import describe_machine, detect_machine
from plait.machines.gpus import (
    CompileTools,
    NvidiaCards,
    ThisHost,
    TorchBuild,
    TorchGpus,
    check_gpu_computes,
    find_compile_tools,
    find_nvidia_cards,
    has_kernels_for,
    why_not_compiled,
)
from plait.machines.machine import Machine
from plait.machines.requested_workers import RequestedWorkers
from tests.machines.described_gpus import CUDA_13, ON_PROCESSORS, DescribedGpus, DescribedHost, described_gpus

DRIVER_TEXT = """NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Release Build
GCC version:  gcc version 12.3.0
"""
LIST, VERSION = "nvidia-smi -L", "nvidia-smi --query-gpu=driver_version --format=csv,noheader"
EMPTY = DescribedHost()


def host(driver: str = "580.65.06", cards: int = 2, **variables: str) -> DescribedHost:
    devices = {f"/dev/nvidia{number}": "" for number in range(cards)}
    return DescribedHost(
        files={"/dev/nvidiactl": "", "/proc/driver/nvidia/version": DRIVER_TEXT.format(driver), **devices},
        variables=variables,
    )


WSL = DescribedHost(answers={LIST: "GPU 0: NVIDIA GeForce RTX 4090 (UUID: GPU-1)\n", VERSION: "550.54.15\n"})


def test_cards_are_found_without_torch() -> None:
    assert find_nvidia_cards(host()) == NvidiaCards(count=2, driver="580.65.06")
    assert find_nvidia_cards(WSL) == NvidiaCards(count=1, driver="550.54.15")
    no_card_handed_in = host(cards=0)
    assert find_nvidia_cards(no_card_handed_in) == NvidiaCards(count=0, driver=None)


def test_this_host_answers_as_a_described_one_does(tmp_path: Path) -> None:
    (tmp_path / "version").write_text("580")
    here = ThisHost()
    assert here.text(str(tmp_path / "version")) == "580"
    assert list(here.names_in(str(tmp_path))) == ["version"]
    assert here.text(str(tmp_path / "none")) is None
    assert list(here.names_in(str(tmp_path / "none"))) == []
    assert here.answer(["echo", "GPU 0"]) == "GPU 0\n"
    assert here.answer(["false"]) is here.answer([str(tmp_path / "none")]) is None
    assert TorchGpus().count() >= 0
    assert TorchGpus().build().version


@pytest.mark.parametrize(
    ("here", "built", "told"),
    [
        (
            host(),
            ON_PROCESSORS,
            "this machine has 2 NVIDIA GPUs, and torch 2.13.0\\+cpu is built without CUDA; install",
        ),
        (
            host("550.54.15"),
            CUDA_13,
            "for CUDA 13.0 needs driver 580 or newer, not 550.54.15; update the driver, install torch for CUDA 12, or",
        ),
        (
            host("470.82.01"),
            CUDA_13,
            "needs driver 580 or newer, not 470.82.01; update the driver, or write run.devices",
        ),
        (WSL, CUDA_13, "this machine has 1 NVIDIA GPU, and torch 2.13.0 for CUDA 13.0 needs driver 580"),
        (
            host(),
            CUDA_13,
            'cannot use any; see what nvidia-smi says, restart the machine, or write run.devices = "cpu"',
        ),
        (host(CUDA_VISIBLE_DEVICES="0"), ON_PROCESSORS, "built without CUDA"),
        (
            host(CUDA_VISIBLE_DEVICES="5"),
            CUDA_13,
            "CUDA_VISIBLE_DEVICES=5 names GPU 5, and this machine has GPUs 0 to 1",
        ),
    ],
)
def test_gpus_that_torch_does_not_see_are_no_reason_to_train_on_the_processor(
    here: DescribedHost, built: TorchBuild, told: str
) -> None:
    unseen = DescribedGpus(built=built)
    with pytest.raises(PlaitError, match=told):
        detect_machine(library=unseen, here=here)
    with pytest.raises(PlaitError, match=told):
        detect_machine(RequestedWorkers(devices=(0,)), library=unseen, here=here)
    assert detect_machine(RequestedWorkers(devices="cpu"), library=unseen, here=here).device == "cpu"


@pytest.mark.parametrize("here", [EMPTY, host(cards=0), host(CUDA_VISIBLE_DEVICES=""), host(CUDA_VISIBLE_DEVICES="-1")])
def test_without_cards_or_with_hidden_ones_the_processor_trains(here: DescribedHost) -> None:
    assert detect_machine(library=DescribedGpus(), here=here).device == "cpu"


def test_a_number_that_is_not_there_is_not_dropped_in_silence() -> None:
    one_of_two = described_gpus(("A", 24))
    with pytest.raises(
        PlaitError, match="CUDA_VISIBLE_DEVICES=0,2 names GPU 2, and this machine has GPUs 0 to 1; name"
    ):
        detect_machine(library=one_of_two, here=host(CUDA_VISIBLE_DEVICES="0,2"))
    for visible in ("1", "GPU-8932f937", "MIG-7a", "0,-1,9"):
        assert detect_machine(library=one_of_two, here=host(CUDA_VISIBLE_DEVICES=visible)).devices == 1


def test_a_card_that_another_program_uses_is_refused_unless_it_is_not_asked_for() -> None:
    taken = replace(described_gpus(("H100", 80), ("H100", 80)), free={1: 30 * 2**30})
    with pytest.raises(PlaitError, match="GPU 1, a H100 of 80 GiB, has only 30 GiB free: another program uses it; end"):
        detect_machine(library=taken, here=EMPTY)
    assert detect_machine(RequestedWorkers(devices=(0,)), library=taken, here=EMPTY).devices == 1
    assert describe_machine(library=taken).name == "H100"  # what uses them may ask what they are
    with pytest.raises(PlaitError, match="lets no other program in"):
        detect_machine(library=replace(taken, free={0: None}), here=EMPTY)


def test_a_card_that_does_not_compute_is_refused_before_anything_runs_on_it() -> None:
    """Such as one that has fallen off its bus, or one of a driver that exists in a description only."""
    two = replace(described_gpus(("H100", 80), ("H100", 80)), sums={0: 0.0, 1: "CUDA error: unknown error\nmore"})
    check_gpu_computes(described_gpus(("H100", 80)), 0)
    with pytest.raises(PlaitError, match=r"GPU 0, a H100, does not compute \(1,000 ones come to 0 there\); see what "):
        check_gpu_computes(two, 0)
    with pytest.raises(PlaitError, match=r"does not compute \(CUDA error: unknown error\); .*run.devices"):
        check_gpu_computes(two, 1)


def test_a_desktop_and_the_context_of_the_question_are_no_other_program() -> None:
    desktop = replace(described_gpus(("A", 8)), free={0: 13 * 2**29})
    assert detect_machine(library=desktop, here=EMPTY).device == "cuda"


@pytest.mark.parametrize(
    ("capability", "fix"),
    [((7, 0), "install one for CUDA 12.6, which older GPUs need"), ((13, 0), "install a newer one")],
)
def test_a_card_without_kernels_is_refused(capability: tuple[int, int], fix: str) -> None:
    with pytest.raises(PlaitError, match=f"torch 2.13.0 has no kernels for GPU 0, a A .*{fix}"):
        detect_machine(library=described_gpus(("A", 16), capability=capability), here=EMPTY)


def test_a_new_card_under_torch_for_cuda_12_is_told_to_take_13() -> None:
    built = TorchBuild(version="2.13.0+cu126", cuda="12.6", kernels=("sm_75", "sm_80", "sm_90"))
    new = replace(described_gpus(("B200", 180), capability=(10, 0)), built=built)
    with pytest.raises(PlaitError, match=r"a B200 .*install one for CUDA 13 \(driver 580 or newer\), name other GPUs"):
        detect_machine(library=new, here=EMPTY)


@pytest.mark.parametrize(
    ("architecture", "capability", "runs"),
    [
        ("sm_80", (8, 9), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("compute_80", (9, 0), True),
        ("compute_120", (9, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_100a", (10, 3), False),
        ("gfx942", (9, 4), False),
    ],
)
def test_which_kernels_run_where(architecture: str, capability: tuple[int, int], runs: bool) -> None:
    assert has_kernels_for(architecture, capability) is runs


TOOLS = CompileTools(triton=True, compiler="/usr/bin/gcc", headers=Path("/usr/include/python3.11"))


@pytest.mark.parametrize(
    ("tools", "capability", "told"),
    [
        (TOOLS, (7, 0), ""),
        (TOOLS, (6, 1), "compute capability 7.0 and newer, and this is 6.1"),
        (replace(TOOLS, triton=False), (9, 0), "Triton is not installed"),
        (replace(TOOLS, compiler=None), (9, 0), "no C compiler; install gcc"),
        (replace(TOOLS, headers=None), (9, 0), "Python.h is not here; install python3-dev"),
    ],
)
def test_what_is_missing_is_named_with_its_mend(tools: CompileTools, capability: tuple[int, int], told: str) -> None:
    assert told in why_not_compiled(tools, capability)
    assert bool(why_not_compiled(tools, capability)) == bool(told)


def test_a_compiler_is_found_where_path_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    assert find_compile_tools(str(tmp_path)).compiler is None
    made = tmp_path / "gcc"
    shutil.copy("/bin/true", made)
    assert find_compile_tools(str(tmp_path)).compiler == str(made)


def test_a_machine_says_what_its_gpus_lack() -> None:
    built = replace(CUDA_13, kernels=("sm_70", "sm_80", "sm_90"))
    mixed = replace(described_gpus(("V100", 32), capability=(7, 0)), built=built)
    old = detect_machine(library=mixed, here=DescribedHost(), tools=replace(TOOLS, compiler=None))
    assert old.without == ("bf16",) and "no C compiler" in old.uncompiled
    assert Machine.from_fingerprint(old.fingerprint()) == old
    new = detect_machine(library=described_gpus(("H100", 80)), here=DescribedHost(), tools=TOOLS)
    assert (new.without, new.uncompiled) == ((), "")
    assert not {"without", "uncompiled"} & new.fingerprint().keys()
