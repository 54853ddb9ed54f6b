"""FSDP2: blocks and root are sharded, head and embedding share their weight, warmup by LambdaLR, clip over DTensors."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class FeedForward(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(d, 2 * d, False), nn.Linear(2 * d, d, False), nn.Linear(d, 2 * d, False)
        self.norm = nn.RMSNorm(d)

    def forward(self, x):
        h = self.norm(x)
        return x + self.w2(nn.functional.silu(self.w1(h)) * self.w3(h))


class Model(nn.Module):
    def __init__(self, vocab=50, d=24, n=3):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList([FeedForward(d) for _ in range(n)])
        self.output = nn.Linear(d, vocab, bias=False)
        self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        h = h.cumsum(1) / torch.arange(1, tokens.shape[1] + 1)[:, None]
        for layer in self.layers:
            h = layer(h)
        return self.output(h)


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, foreach=True)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 4))
    gen = torch.Generator().manual_seed(dist.get_rank() + 1)
    for _ in range(8):
        opt.zero_grad()
        tokens = torch.randint(0, 50, (6, 17), generator=gen)
        pred = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(pred.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        sched.step()
        norm = norm.full_tensor()
        if dist.get_rank() == 0:
            print(f"loss {loss.item():.3f} norm {norm.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
