"""Brings TorchTPU up on a machine without a TPU, over XLA's plugin for processors.

torch loads it as it loads TorchTPU itself: it imports the entry points of the group "torch.backends" of all packages on
sys.path, and this folder, on PYTHONPATH, is one. TorchTPU registers its device only where it sees a chip on the PCI
bus, so its private loader is called here. The plugin lacks what a chip has beside arithmetic: its name and memory, and
collectives, which staged_collectives.py carries through the host's memory by gloo.
"""

from __future__ import annotations

import os
from pathlib import Path

THREADS = "64"
"""Of the plugin. It has as many as the machine has cores, at least four, and runs at most 32 programs at a time; when
one is over, TorchTPU frees its inputs on such a thread, which waits until no other program reads them. Where all
threads wait so, none is left to run that program, and nothing ends any more: a step of experts came to it with four."""


def load() -> None:
    """Register the device "tpu" in this process, as `torch_tpu` does on a TPU VM."""
    import xla_plugins.xla_cpu_pjrt as plugin

    os.environ.setdefault("TORCH_TPU_TOPOLOGY", "1,1,1")
    os.environ.setdefault("PJRT_NPROC", THREADS)
    os.environ.setdefault("TPU_LIBRARY_PATH", str(Path(plugin.__path__[0]) / "xla_cpu_pjrt.so"))
    import staged_collectives
    import torch_tpu  # noqa: F401
    from torch_tpu import _loader
    from torch_tpu._internal.distributed import tpu_distributed
    from torch_tpu._internal.utils import hardware

    hardware.get_tpu_device_name = lambda: "TPU v5e"
    tpu_distributed.create_process_group = staged_collectives.create_process_group
    _loader._init_device_impl("tpu")
    _loader._LOADED = True


def compilations() -> int:
    """How many programs this process has compiled so far."""
    from torch_tpu._internal.device import _device_ops_backend

    return int(_device_ops_backend._get_cache_misses())
