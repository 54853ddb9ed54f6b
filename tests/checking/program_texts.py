"""Programs in the styles in which people write them, sound as they stand; cases change lines of them."""

from __future__ import annotations

CLASSIFIER = """
import os
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.fc2 = nn.Linear(32, 32)
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        x = F.relu(self.norm(self.fc1(x)))
        x = F.relu(self.fc2(x))
        return self.head(x)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = torch.randn(96, 16)
    labels = data[:, :5].argmax(1)
    dataset = TensorDataset(data, labels)
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    net = Net()
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            if rank == 0:
                print(f"epoch {epoch} loss {total.item() / world_size:.5f}")
    dist.destroy_process_group()


main()
"""

LANGUAGE_MODEL = """
import argparse
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from contextlib import nullcontext
from torch.nn.parallel import DistributedDataParallel

PAD = -100


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.ln1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.proj(a)
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class LM(nn.Module):
    def __init__(self, vocab=40, width=24):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, idx):
        x = self.embed(idx)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Documents(torch.utils.data.Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(7)
        lengths = torch.randint(4, 24, (n,), generator=g).tolist()
        self.docs = [torch.randint(1, 40, (length,), generator=g) for length in lengths]

    def __len__(self):
        return len(self.docs)

    def __getitem__(self, i):
        return self.docs[i]


def collate(docs):
    length = max(len(d) for d in docs)
    idx = torch.zeros(len(docs), length, dtype=torch.long)
    target = torch.full((len(docs), length), PAD)
    for row, d in enumerate(docs):
        idx[row, : len(d)] = d
        target[row, : len(d) - 1] = d[1:]
    return idx, target


def main(args):
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = LM()
    ddp = DistributedDataParallel(model)
    data = Documents(64)
    sampler = torch.utils.data.DistributedSampler(data, shuffle=True)
    loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler, collate_fn=collate)
    opt = torch.optim.AdamW(ddp.parameters(), lr=1e-3, weight_decay=0.0)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 10))
    step = 0
    batches = []
    for idx, target in loader:
        batches.append((idx, target))
        if len(batches) < args.accum:
            continue
        tokens = torch.tensor(float(sum((t != PAD).sum() for _, t in batches)))
        dist.all_reduce(tokens)
        opt.zero_grad()
        shown = torch.zeros(())
        for i, (idx, target) in enumerate(batches):
            last = i == len(batches) - 1
            with nullcontext() if last else ddp.no_sync():
                logits = ddp(idx)
                loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum")
                loss = loss * world / tokens
                loss.backward()
                shown += loss.detach()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        opt.step()
        sched.step()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.4f}")
        step += 1
        batches = []
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--accum", type=int, default=2)
    main(parser.parse_args())
"""

LOOP = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
for p in model.parameters():
    dist.broadcast(p.data, src=0)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(100 + rank)
for step in range(8):
    x = torch.randn(32, 8, generator=generator)
    y = x.sum(1, keepdim=True).sin()
    loss = ((model(x) - y) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    optimizer.step()
dist.destroy_process_group()
"""

FSDP = """
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.w1 = nn.Linear(d, 4 * d)
        self.w2 = nn.Linear(4 * d, d)

    def forward(self, x):
        return x + self.w2(F.silu(self.w1(self.norm(x))))


class Model(nn.Module):
    def __init__(self, d=16, n=2, out=7):
        super().__init__()
        self.inp = nn.Linear(6, d)
        self.layers = nn.ModuleList([Layer(d) for _ in range(n)])
        self.out = nn.Linear(d, out)

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def batches(rank, world, n=8):
    g = torch.Generator().manual_seed(11)
    for _ in range(n):
        x = torch.randn(world * 6, 6, generator=g)
        y = torch.randint(0, 7, (world * 6,), generator=g)
        yield x[rank::world], y[rank::world]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    mesh = init_device_mesh("cpu", (world,))
    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for x, y in batches(rank, world):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        opt.zero_grad()
    dist.destroy_process_group()


main()
"""

ACCELERATE = """
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(gradient_accumulation_steps=2)
set_seed(42)
features = torch.randn(80, 10)
labels = (features.sum(1) > 0).long()
train = DataLoader(TensorDataset(features[:64], labels[:64]), batch_size=4, shuffle=True)
valid = DataLoader(TensorDataset(features[64:], labels[64:]), batch_size=4)
model = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=len(train))
model, optimizer, train, valid, scheduler = accelerator.prepare(model, optimizer, train, valid, scheduler)
loss_fn = nn.CrossEntropyLoss()
for epoch in range(1):
    model.train()
    for x, y in train:
        with accelerator.accumulate(model):
            loss = loss_fn(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    right = seen = 0
    for x, y in valid:
        with torch.no_grad():
            guess = model(x).argmax(-1)
        guess, y = accelerator.gather_for_metrics((guess, y))
        right += (guess == y).sum().item()
        seen += len(y)
    accelerator.print(f"accuracy {right / seen:.3f}")
"""

TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Texts(torch.utils.data.Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(3)
        lengths = torch.randint(5, 20, (n,), generator=g).tolist()
        self.rows = [torch.randint(1, 60, (length,), generator=g) for length in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    length = max(map(len, rows))
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    labels = torch.full((len(rows), length), -100)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
        labels[i, : len(row)] = row
    return {"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}


config = GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2,
                    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
torch.manual_seed(0)
model = GPT2LMHeadModel(config)
args = TrainingArguments(
    output_dir="unused", per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=6, learning_rate=1e-3,
    logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, average_tokens_across_devices=True,
)
Trainer(model=model, args=args, train_dataset=Texts(64), data_collator=collate).train()
"""
