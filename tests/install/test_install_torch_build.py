"""Which build of torch a machine gets."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch_build import build_for, choose_torch, suits_gpus

OWN = "https://own"
PYPI = ["2.15.0", "2.13.0", "2.11.0", "2.10.0"]
WITH_CPU = ["2.15.0", "2.13.0+cpu", "2.13.0", "2.10.0+cpu"]


VOLTA, TURING, HOPPER, BLACKWELL = (7, 0), (7, 5), (9, 0), (12, 0)


def choose(
    pip: list[str],
    driver: str | None,
    named: str = "",
    gpus: Sequence[tuple[int, int]] = (),
    **own: list[str],
) -> tuple[str, str | None] | None:
    """Version and index, where pip's own index has the versions `pip`, and PyTorch's have `own`."""
    indexes = {None: pip, **{f"{OWN}/{name}": versions for name, versions in own.items()}}
    choice = choose_torch(lambda index: indexes.get(index, []), driver, OWN, named, gpus)
    return (choice.version, choice.address) if choice else None


def test_without_a_driver_the_cpu_build_comes_from_pip_or_else_from_pytorch() -> None:
    assert choose(WITH_CPU, None) == ("2.13.0+cpu", None)
    assert choose(PYPI, None, cpu=["2.14.0+cpu", "2.13.0+cpu"]) == ("2.13.0+cpu", f"{OWN}/cpu")


def test_the_newest_comes_where_the_tested_version_is_missing() -> None:
    assert choose(PYPI, None, cpu=["2.15.0+cpu", "2.14.1+cpu"]) == ("2.15.0+cpu", f"{OWN}/cpu")


def test_the_usual_build_is_the_last_resort_and_nothing_older_than_the_oldest_is_taken() -> None:
    assert choose(PYPI, None) == ("2.13.0", None)
    assert choose(["2.10.0"], None, cpu=["2.10.0+cpu"]) is None


def test_a_driver_decides_which_cuda() -> None:
    assert choose(WITH_CPU, "580.65.06") == ("2.13.0", None)
    assert choose(WITH_CPU, "550.54.15", cu126=["2.13.0+cu126"]) == ("2.13.0+cu126", f"{OWN}/cu126")
    assert choose(WITH_CPU, "470.82.01") == ("2.13.0+cpu", None)


def test_an_index_that_is_named_decides_alone() -> None:
    assert choose(WITH_CPU, None, "https://own/rocm", rocm=["2.13.0+rocm7.1"]) == ("2.13.0+rocm7.1", "https://own/rocm")
    assert choose(WITH_CPU, None, "https://own/rocm") is None


@pytest.mark.parametrize(("driver", "index"), [(None, "cpu"), ("580", "cu130"), ("579.99", "cu126"), ("524.9", "cpu")])
def test_each_driver_has_its_build(driver: str | None, index: str) -> None:
    assert build_for(driver)[0].own_index == index


@pytest.mark.parametrize(
    ("driver", "gpus", "index", "said"),
    [
        ("580.65", [HOPPER, BLACKWELL], "cu130", "the NVIDIA driver is 580.65"),
        ("580.65", [TURING], "cu130", "the NVIDIA driver is 580.65"),
        ("580.65", [VOLTA], "cu126", "and the CUDA 13 build has no kernels for compute capability 7.0"),
        ("580.65", [HOPPER, VOLTA], "cu126", "and the CUDA 13 build has no kernels for compute capability 7.0"),
        ("570.86", [HOPPER], "cu126", "and CUDA 13 needs 580"),
        ("570.86", [BLACKWELL], "cu128", "and the CUDA 12.6 build has no kernels for compute capability 12.0"),
        ("580.65", [VOLTA, BLACKWELL], "cu130", "the NVIDIA driver is 580.65"),
        ("470.82", [VOLTA], "cpu", "torch needs 525, better 580"),
    ],
)
def test_the_build_has_kernels_for_the_gpus(driver: str, gpus: list[tuple[int, int]], index: str, said: str) -> None:
    build, reason = build_for(driver, gpus)
    assert build.own_index == index and reason.endswith(said)


def test_the_last_torch_with_kernels_for_new_gpus_under_an_old_driver_is_found() -> None:
    """cu126 has torch up to 2.14, without Blackwell; cu128 ends with 2.11."""
    own = {"cu126": ["2.14.1+cu126", "2.13.0+cu126"], "cu128": ["2.11.0+cu128", "2.10.0+cu128"]}
    assert choose(PYPI, "575.57", gpus=[BLACKWELL], **own) == ("2.11.0+cu128", f"{OWN}/cu128")
    assert choose(PYPI, "575.57", gpus=[HOPPER], **own) == ("2.13.0+cu126", f"{OWN}/cu126")
    assert choose(PYPI, "580.65", gpus=[VOLTA], **own) == ("2.13.0+cu126", f"{OWN}/cu126")


@pytest.mark.parametrize(
    ("version", "driver", "gpus", "suits"),
    [
        ("2.13.0+cpu", None, [], True),
        ("2.13.0+cpu", "580.65", [], False),
        ("2.13.0", "580.65", [], True),
        ("2.13.0", "550.54", [], False),
        ("2.14.0+cu132", "550.54", [], False),
        ("2.13.0+cu126", "550.54", [], True),
        ("2.13.0+cu126", "580.65", [], True),
        ("2.11.0+cu128", "550.54", [HOPPER], True),
        ("2.13.0+cpu", "470.82", [], True),
        ("2.13.0+rocm7.1", "550.54", [], True),
        ("2.13.0", "580.65", [VOLTA], False),
        ("2.13.0+cu126", "580.65", [VOLTA], True),
        ("2.13.0+cu126", "580.65", [BLACKWELL], False),
        ("2.13.0+cu126", "580.65", [BLACKWELL, VOLTA], True),
    ],
)
def test_a_torch_that_is_here_is_kept_only_where_it_can_use_the_gpus(
    version: str, driver: str | None, gpus: list[tuple[int, int]], suits: bool
) -> None:
    assert suits_gpus(version, driver, gpus) is suits
