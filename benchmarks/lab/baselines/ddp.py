"""torch's DistributedDataParallel around plait's model, as its documentation advises it for speed."""

from __future__ import annotations

from contextlib import nullcontext

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.lab.baselines.work import CLIP, Model, Steps, adamw, leave, micro_batches, read_work


def main() -> None:
    work = read_work()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Model(work.shape), gradient_as_bucket_view=True, broadcast_buffers=False)
    optimizer, steps = adamw(model), Steps(work)
    steps.begin()
    for _ in range(work.steps):
        micros = list(micro_batches(work))
        for number, (inputs_bt, targets_bt) in enumerate(micros, start=1):
            with nullcontext() if number == len(micros) else model.no_sync():
                (model(inputs_bt, targets_bt) / len(micros)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        steps.end_step()
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
