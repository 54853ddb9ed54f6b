"""LoRA by hand on a frozen network, dropout with a seed of each rank's own."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, r: int = 4, alpha: int = 8, dropout: float = 0.05):
        super().__init__()
        self.base = base
        for p in self.base.parameters():
            p.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(r, base.in_features) / r)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        self.dropout = nn.Dropout(dropout)
        self.scaling = alpha / r

    def forward(self, x):
        return self.base(x) + self.dropout(x) @ self.lora_A.T @ self.lora_B.T * self.scaling


def add_lora(model):
    for name, child in list(model.named_children()):
        if isinstance(child, nn.Linear):
            setattr(model, name, LoRALinear(child))
        else:
            add_lora(child)
    return model


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = add_lora(nn.Sequential(nn.Embedding(50, 16), nn.Flatten(), nn.Linear(128, 32), nn.GELU(), nn.Linear(32, 2)))
    model[0].weight.requires_grad_(False)
    trainable = [p for p in model.parameters() if p.requires_grad]
    print(f"trainable: {sum(p.numel() for p in trainable)} of {sum(p.numel() for p in model.parameters())}")
    model = DDP(model)
    opt = torch.optim.AdamW(trainable, lr=1e-3)
    torch.manual_seed(1234 + rank)
    for _step in range(9):
        ids = torch.randint(0, 50, (10, 8))
        loss = nn.functional.cross_entropy(model(ids), (ids.sum(1) % 2))
        loss.backward()
        nn.utils.clip_grad_norm_(trainable, 0.3)
        opt.step()
        opt.zero_grad()
    dist.destroy_process_group()


main()
