"""Sound programs: each must be proven, with no finding that says it differs.

The first twenty were written together with the diagnosis; the second twenty after its thresholds were frozen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import program_texts as texts
from faulty_cases import changed


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundCase:
    """A program, with the lines that are changed."""

    name: str
    program: str
    changes: Sequence[tuple[str, str]] = ()
    workers: int = 2
    arguments: Sequence[str] = ()
    needs: str = ""

    @property
    def text(self) -> str:
        return changed(self.program, self.changes)


ACCUM_HALVES = (
    "        for x, y in loader:\n            optimizer.zero_grad()\n"
    "            for a, b in zip(x.chunk(2), y.chunk(2)):\n"
    "                loss = F.cross_entropy(model(a), b) / 2\n                loss.backward()\n"
)
PLAIN = (
    "        for x, y in loader:\n            logits = model(x)\n            loss = F.cross_entropy(logits, y)\n"
    "            optimizer.zero_grad()\n            loss.backward()\n"
)
_SUMS = "    for p in model.parameters():\n        dist.all_reduce(p.grad)\n        p.grad /= world\n"

FIRST_SOUND: Sequence[SoundCase] = (
    SoundCase(name="DDP with clipping and a schedule", program=texts.CLASSIFIER),
    SoundCase(name="DDP on three ranks", program=texts.CLASSIFIER, workers=3),
    SoundCase(name="unequal tokens done right", program=texts.LANGUAGE_MODEL),
    SoundCase(name="unequal tokens, four micro-batches", program=texts.LANGUAGE_MODEL, arguments=("--accum", "4")),
    SoundCase(name="all_reduce by hand", program=texts.LOOP),
    SoundCase(name="FSDP2", program=texts.FSDP),
    SoundCase(name="Accelerate", program=texts.ACCELERATE, needs="accelerate"),
    SoundCase(name="accumulated halves", program=texts.CLASSIFIER, changes=[(PLAIN, ACCUM_HALVES)]),
    SoundCase(
        name="one flat all_reduce", program=texts.LOOP,
        changes=[(_SUMS, "    flat = torch.cat([p.grad.flatten() for p in model.parameters()])\n"
                         "    dist.all_reduce(flat)\n    flat /= world\n    at = 0\n"
                         "    for p in model.parameters():\n"
                         "        p.grad.copy_(flat[at : at + p.numel()].view_as(p))\n        at += p.numel()\n")],
    ),
    SoundCase(
        name="sums in hooks of gradients", program=texts.LOOP,
        changes=[("optimizer = torch", "def average(grad):\n    grad = grad.clone()\n    dist.all_reduce(grad)\n"
                  "    return grad / world\n\n\nfor p in model.parameters():\n    p.register_hook(average)\n"
                  "optimizer = torch"),
                 (_SUMS, "")],
    ),
    SoundCase(
        name="ZeroRedundancyOptimizer", program=texts.CLASSIFIER,
        changes=[("import os\n", "from torch.distributed.optim import ZeroRedundancyOptimizer\n"),
                 ("torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)",
                  "ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)")],
    ),
    SoundCase(
        name="frozen layer", program=texts.CLASSIFIER,
        changes=[("    net = Net()\n", "    net = Net()\n    net.fc2.requires_grad_(False)\n"),
                 ("torch.optim.SGD(model.parameters()",
                  "torch.optim.SGD([p for p in model.parameters() if p.requires_grad]")],
    ),
    SoundCase(
        name="dropout seeded by rank", program=texts.CLASSIFIER,
        changes=[("return self.head(x)", "return self.head(F.dropout(x, 0.2, self.training))"),
                 ("    model = DDP(net)\n", "    model = DDP(net)\n    torch.manual_seed(1000 + rank)\n")],
    ),
    SoundCase(
        name="bf16 autocast", program=texts.CLASSIFIER,
        changes=[("            logits = model(x)\n            loss = F.cross_entropy(logits, y)\n",
                  "            with torch.autocast('cpu', dtype=torch.bfloat16):\n                logits = model(x)\n"
                  "                loss = F.cross_entropy(logits, y)\n")],
    ),
    SoundCase(
        name="label smoothing", program=texts.CLASSIFIER,
        changes=[("F.cross_entropy(logits, y)", "F.cross_entropy(logits, y, label_smoothing=0.1)")],
    ),
    SoundCase(
        name="masked mean with a global count", program=texts.LANGUAGE_MODEL,
        changes=[('target.flatten(), ignore_index=PAD, reduction="sum")',
                  'target.flatten().clamp(min=0), reduction="none")\n'
                  "                mask = (target.flatten() != PAD).float()\n"
                  "                loss = (loss * mask).sum()")],
    ),
    SoundCase(
        name="clipping by hand after the sum", program=texts.LOOP,
        changes=[("    optimizer.step()\n",
                  "    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()\n"
                  "    for p in model.parameters():\n        p.grad.mul_(torch.clamp(0.3 / norm, max=1.0))\n"
                  "    optimizer.step()\n")],
    ),
    SoundCase(
        name="a mean times a constant", program=texts.LOOP,
        changes=[("loss = ((model(x) - y) ** 2).mean()", "loss = 0.5 * ((model(x) - y) ** 2).mean()")],
    ),
    SoundCase(
        name="FSDP2 with accumulation", program=texts.FSDP,
        changes=[("        loss = F.cross_entropy(model(x), y)\n        loss.backward()\n",
                  "        model.set_requires_gradient_sync(False)\n"
                  "        (F.cross_entropy(model(x[:3]), y[:3]) / 2).backward()\n"
                  "        model.set_requires_gradient_sync(True)\n"
                  "        (F.cross_entropy(model(x[3:]), y[3:]) / 2).backward()\n")],
    ),
    SoundCase(
        name="written for GPUs", program=texts.CLASSIFIER,
        changes=[('dist.init_process_group("gloo")',
                  'local_rank = int(os.environ["LOCAL_RANK"])\n    torch.cuda.set_device(local_rank)\n'
                  '    dist.init_process_group("nccl")'),
                 ("net = Net()", 'net = Net().cuda(local_rank)'), ("DDP(net)", "DDP(net, device_ids=[local_rank])"),
                 ("            logits = model(x)\n",
                  "            x, y = x.to(f'cuda:{local_rank}', non_blocking=True), y.cuda()\n"
                  "            logits = model(x)\n")],
    ),
)  # fmt: skip

_ADVERSARIES = """
import torch, torch.distributed as dist, torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
G = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)))
D = DDP(nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)))
opt_g, opt_d = torch.optim.Adam(G.parameters(), 1e-3), torch.optim.Adam(D.parameters(), 1e-3)
bce = nn.BCEWithLogitsLoss()
torch.manual_seed(50 + rank)
for _ in range(6):
    real, noise = torch.randn(16, 2) + 3, torch.randn(16, 4)
    opt_d.zero_grad()
    bce(D(real), torch.ones(16, 1)).backward()
    fake = G(noise)
    bce(D(fake.detach()), torch.zeros(16, 1)).backward()
    opt_d.step()
    opt_g.zero_grad()
    bce(D(G(noise)), torch.ones(16, 1)).backward()
    opt_g.step()
"""

_SPAWNED = """
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP


def work(rank, world):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", os.environ.get("MASTER_PORT", "29511")
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for _ in range(5):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(torch.randn(10, 6)), torch.randn(10, 3)).backward()
        optimizer.step()


if __name__ == "__main__":
    mp.spawn(work, args=(2,), nprocs=2)
"""

_UNEQUAL = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
net = torch.nn.LSTM(5, 8, batch_first=True)
out = torch.nn.Linear(8, 2)
params = [*net.parameters(), *out.parameters()]
optimizer = torch.optim.RMSprop(params, lr=1e-3)
torch.manual_seed(70 + rank)
for step in range(6):
    rows = 6 if rank == 0 else 14
    x, y = torch.randn(rows, 7, 5), torch.randint(0, 2, (rows,))
    count = torch.tensor(float(rows))
    dist.all_reduce(count)
    loss = torch.nn.functional.cross_entropy(out(net(x)[0][:, -1]), y) * rows / count
    optimizer.zero_grad()
    loss.backward()
    for p in params:
        dist.all_reduce(p.grad)
    optimizer.step()
"""

_MIXTURE = """
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(12, 4)
        self.experts = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        p = self.router(x).softmax(-1)
        weight, chosen = p.max(-1)
        y = sum((chosen == i).unsqueeze(-1) * weight.unsqueeze(-1) * e(x) for i, e in enumerate(self.experts))
        return self.head(x + y), p.mean(0).pow(2).sum() * 4


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(Mixture())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(9 + rank)
for _ in range(6):
    x, y = torch.randn(20, 12), torch.randint(0, 3, (20,))
    logits, balance = model(x)
    optimizer.zero_grad(set_to_none=False)
    (F.cross_entropy(logits, y) + 0.01 * balance).backward()
    optimizer.step()
"""

_PICTURES = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __init__(self, rank, world):
        self.rank, self.world = rank, world

    def __iter__(self):
        g = torch.Generator().manual_seed(1)
        for i in range(60):
            image, label = torch.randn(3, 8, 8, generator=g), int(torch.randint(0, 4, (1,), generator=g))
            if i % self.world == self.rank:
                yield image, label


def train():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3),
                        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    net = DistributedDataParallel(net, gradient_as_bucket_view=True)
    decay = [p for p in net.parameters() if p.dim() > 1]
    plain = [p for p in net.parameters() if p.dim() <= 1]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=2e-3)
    for images, labels in DataLoader(Stream(dist.get_rank(), dist.get_world_size()), batch_size=6):
        opt.zero_grad()
        nn.CrossEntropyLoss()(net(images), labels).backward()
        opt.step()


if __name__ == "__main__":
    train()
"""

SECOND_SOUND: Sequence[SoundCase] = (
    SoundCase(name="two adversaries", program=_ADVERSARIES),
    SoundCase(name="processes of its own", program=_SPAWNED),
    SoundCase(name="unequal ranks weighed by hand", program=_UNEQUAL),
    SoundCase(name="mixture with a balance loss", program=_MIXTURE),
    SoundCase(name="pictures from a stream", program=_PICTURES),
    SoundCase(name="Trainer", program=texts.TRAINER, needs="transformers"),
    SoundCase(
        name="Accelerate with bf16", program=texts.ACCELERATE,
        changes=[("gradient_accumulation_steps=2", 'gradient_accumulation_steps=2, mixed_precision="bf16"')],
        needs="accelerate",
    ),
    SoundCase(
        name="FSDP2 with bf16", program=texts.FSDP,
        changes=[("import fully_shard", "import MixedPrecisionPolicy, fully_shard"),
                 ("mesh=mesh)", "mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))")],
    ),
    SoundCase(name="FSDP2 on three ranks", program=texts.FSDP, workers=3),
    SoundCase(
        name="recomputed layers", program=texts.LANGUAGE_MODEL,
        changes=[("            x = block(x)\n",
                  "            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)\n"),
                 ("import torch.distributed", "import torch.utils.checkpoint\nimport torch.distributed")],
    ),
    SoundCase(
        name="sums sent in fp16", program=texts.CLASSIFIER,
        changes=[("    model = DDP(net)\n",
                  "    model = DDP(net)\n    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
                  "    model.register_comm_hook(None, default_hooks.fp16_compress_hook)\n")],
    ),
    SoundCase(
        name="two terms", program=texts.LOOP,
        changes=[("loss = ((model(x) - y) ** 2).mean()",
                  "out = model(x)\n    loss = torch.nn.functional.mse_loss(out, y) + 0.1 * (out - y).abs().mean()")],
    ),
    SoundCase(
        name="mean over documents", program=texts.LANGUAGE_MODEL,
        changes=[('target.flatten(), ignore_index=PAD, reduction="sum")',
                  'target.flatten(), ignore_index=PAD, reduction="none")'),
                 ("                loss = loss * world / tokens\n",
                  "                loss = loss.view(len(idx), -1).sum(1) / (target != PAD).sum(1)\n"
                  "                loss = loss.mean() / args.accum\n")],
    ),
    SoundCase(
        name="two losses, two backward passes", program=texts.LOOP,
        changes=[("    loss.backward()\n",
                  "    loss.backward()\n    torch.nn.functional.l1_loss(model(-x), -y).backward()\n")],
    ),
    SoundCase(
        name="data set sliced by rank", program=texts.CLASSIFIER,
        changes=[("    dataset = TensorDataset(data, labels)\n",
                  "    dataset = TensorDataset(data[rank::world_size], labels[rank::world_size])\n"),
                 ("DistributedSampler(dataset, shuffle=True)", "torch.utils.data.RandomSampler(dataset)"),
                 ("        sampler.set_epoch(epoch)\n", "")],
    ),
    SoundCase(
        name="loader processes", program=texts.CLASSIFIER,
        changes=[("sampler=sampler)", "sampler=sampler, num_workers=1, persistent_workers=True)")],
    ),
    SoundCase(
        name="every rank evaluates everything", program=texts.CLASSIFIER,
        changes=[("    dist.destroy_process_group()\n\n\nmain()",
                  "    net.eval()\n    with torch.no_grad():\n"
                  "        for x, y in DataLoader(dataset, batch_size=10):\n            net(x)\n"
                  "    dist.destroy_process_group()\n\n\nmain()")],
    ),
    SoundCase(
        name="OneCycleLR and Nesterov", program=texts.CLASSIFIER,
        changes=[("torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)",
                  "torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=12)"),
                 ("momentum=0.9)", "momentum=0.9, nesterov=True, weight_decay=1e-3)")],
    ),
    SoundCase(
        name="averaged weights beside", program=texts.CLASSIFIER,
        changes=[("    model = DDP(net)\n",
                  "    model = DDP(net)\n    average = torch.optim.swa_utils.AveragedModel(net)\n"),
                 ("            scheduler.step()\n",
                  "            scheduler.step()\n            average.update_parameters(net)\n")],
    ),
    SoundCase(
        name="weights in float64", program=texts.LOOP,
        changes=[("torch.manual_seed(3)\n", "torch.manual_seed(3)\ntorch.set_default_dtype(torch.float64)\n")],
    ),
)  # fmt: skip
