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


_ACCUM_HALVES = (
    "        for x, y in loader:\n            optimizer.zero_grad()\n            for a, b in zip(x.chunk(2), y.chunk(2)):\n"
    "                loss = F.cross_entropy(model(a), b) / 2\n                loss.backward()\n"
)
_PLAIN = (
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
    SoundCase(name="accumulated halves", program=texts.CLASSIFIER, changes=[(_PLAIN, _ACCUM_HALVES)]),
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
                  "    return grad / world\n\n\nfor p in model.parameters():\n    p.register_hook(average)\noptimizer = torch"),
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
                 ("torch.optim.SGD(model.parameters()", "torch.optim.SGD([p for p in model.parameters() if p.requires_grad]")],
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
