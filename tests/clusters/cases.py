"""Clusters and what is submitted to them, as a person types it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from plait.clusters.request import SubmitRequest

RECIPE = """[run]
name = "web_125m"

[data]
files = "web.txt"

[model]
size = "125M"

[train]
sequence = 1024
batch_tokens = 524288
budget = "2B tokens"
"""
IMAGE = "image=registry.example/plait@sha256:0123456789abcdef"
CASES: Mapping[str, SubmitRequest] = {
    "slurm-h100": SubmitRequest(
        target=("web.toml",),
        scheduler="slurm",
        cluster="16x(8xH100)",
        nodes=2,
        time="1-12:00:00",
        options=("account=lab", "qos=high", "partition=gpu", "python=/opt/plait/bin/python"),
    ),
    "slurm-unequal": SubmitRequest(
        target=("web.toml", "run.name=both"),
        scheduler="slurm",
        cluster="2x(8xA100)+1x(8xH100)+400G",
        nodes=3,
        gpus=4,
        options=("partition=a100+h100", "image=apptainer:plait.sif", "grace=2 minutes"),
    ),
    "slurm-processors": SubmitRequest(
        target=("train_digits.py", "--epochs", "3"),
        scheduler="slurm",
        cluster="8x(1xserver)",
        nodes=2,
        options=("cpus=16", "memory=64G", "image=docker://registry.example/plait:1", "reservation=course"),
    ),
    "ray-grows": SubmitRequest(
        target=("web.toml",), scheduler="ray", cluster="16x(8xH100)", nodes=2, options=("max_nodes=4", "cpus=64")
    ),
    "skypilot-spot": SubmitRequest(
        target=("web.toml", "run.name=spot"),
        scheduler="skypilot",
        cluster="4x(8xA100)",
        nodes=2,
        options=("spot=yes", "volume=web-work", "wheel=plait-0.2.0-py3-none-any.whl", "infra=k8s", "memory=512"),
    ),
    "dstack-spot": SubmitRequest(
        target=("web.toml", "run.name=spot"),
        scheduler="dstack",
        cluster="4x(8xA100)",
        nodes=2,
        options=("spot=yes", "volume=web-work-{rank}", IMAGE, "cpus=48"),
    ),
    "dstack-processors": SubmitRequest(
        target=("train_digits.py", "--name", "a b"),
        scheduler="dstack",
        cluster="1x(1xserver)",
        nodes=1,
        options=("wheel=plait-0.2.0-py3-none-any.whl",),
    ),
    "ssh-office": SubmitRequest(
        target=("web.toml", "train.budget=200 steps"),
        scheduler="ssh",
        cluster="3x(1xdesktop)",
        machines=("ann", "bob", "cy"),
        options=("python=/opt/plait/bin/python", "address=10.0.0.1"),
    ),
    "kubernetes-jobset": SubmitRequest(
        target=("web.toml",),
        scheduler="kubernetes",
        cluster="32x(8xH100)",
        time="20 hours",
        options=(IMAGE, "namespace=train", "queue=research", "memory=512Gi", "cpu=48"),
    ),
    "kubernetes-trainjob": SubmitRequest(
        target=("web.toml",),
        scheduler="kubernetes",
        cluster="4x(4xL40S)",
        nodes=2,
        kind="trainjob",
        options=(IMAGE, "storage=500Gi", "storage_class=nfs"),
    ),
    "kubernetes-job": SubmitRequest(
        target=("train_digits.py",),
        scheduler="kubernetes",
        cluster="4x(1xserver)",
        nodes=2,
        kind="job",
        options=(IMAGE, "volume=shared"),
    ),
}


def write_inputs(folder: Path) -> None:
    """The files that the cases name."""
    (folder / "web.toml").write_text(RECIPE)
    (folder / "web.txt").touch()  # nothing to estimate its tokens from: the plan takes the usual ones
    (folder / "train_digits.py").write_text("import plait\n\nplait.spread\n")
    (folder / "plait-0.2.0-py3-none-any.whl").touch()  # named, and not opened
