"""Language model on texts of unequal length: losses are summed, then divided by the tokens of the whole step."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence

IGNORE = -100
MICROS = 2


class LSTMLM(nn.Module):
    def __init__(self, vocab=35, d=20):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.rnn = nn.LSTM(d, d, batch_first=True)
        self.out = nn.Linear(d, vocab)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


def micro_batch(gen):
    texts = [torch.randint(0, 35, (int(torch.randint(3, 25, (1,), generator=gen)),), generator=gen) for _ in range(5)]
    ids = pad_sequence(texts, batch_first=True)
    labels = pad_sequence(texts, batch_first=True, padding_value=IGNORE)
    return ids[:, :-1], labels[:, 1:]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = DDP(LSTMLM())
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    gen = torch.Generator().manual_seed(rank)
    for step in range(8):
        micros = [micro_batch(gen) for _ in range(MICROS)]
        tokens = torch.tensor(sum((labels != IGNORE).sum() for _, labels in micros))
        dist.all_reduce(tokens)
        total = torch.zeros(())
        for i, (ids, labels) in enumerate(micros):
            model.require_backward_grad_sync = i == MICROS - 1
            nll = nn.functional.cross_entropy(model(ids).transpose(1, 2), labels, ignore_index=IGNORE, reduction="sum")
            (nll * world / tokens).backward()
            total += nll.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step}: {total / tokens:.4f} over {int(tokens)} tokens")
    dist.destroy_process_group()


main()
