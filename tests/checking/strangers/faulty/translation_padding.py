#!/usr/bin/env python
"""Copy task for an encoder-decoder with padded batches."""

import os

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

PAD, BOS, EOS, VOCAB = 0, 1, 2, 40
LOCAL_RANK = int(os.environ["LOCAL_RANK"])


def make_corpus(n=192):
    gen = torch.Generator().manual_seed(3)
    corpus = []
    for _ in range(n):
        length = int(torch.randint(2, 20, (1,), generator=gen))
        corpus.append(torch.randint(3, VOCAB, (length,), generator=gen))
    return corpus


def collate(sentences):
    src = pad_sequence(sentences, batch_first=True, padding_value=PAD)
    tgt_in = pad_sequence([torch.cat([torch.tensor([BOS]), s]) for s in sentences], batch_first=True, padding_value=PAD)
    tgt_out = pad_sequence(
        [torch.cat([s, torch.tensor([EOS])]) for s in sentences], batch_first=True, padding_value=PAD
    )
    return src, tgt_in, tgt_out


class Seq2Seq(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.src_emb = nn.Embedding(VOCAB, d, padding_idx=PAD)
        self.tgt_emb = nn.Embedding(VOCAB, d, padding_idx=PAD)
        self.encoder = nn.GRU(d, d, batch_first=True)
        self.decoder = nn.GRU(d, d, batch_first=True)
        self.generator = nn.Linear(d, VOCAB)

    def forward(self, src, tgt):
        _, state = self.encoder(self.src_emb(src))
        out, _ = self.decoder(self.tgt_emb(tgt), state)
        return self.generator(out)


def main():
    torch.distributed.init_process_group(backend="gloo")
    torch.manual_seed(42)
    corpus = make_corpus()
    sampler = DistributedSampler(corpus)
    loader = DataLoader(corpus, batch_size=8, sampler=sampler, collate_fn=collate)
    model = DistributedDataParallel(Seq2Seq())
    criterion = nn.CrossEntropyLoss(ignore_index=PAD)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9)
    for epoch in range(1, 3):
        sampler.set_epoch(epoch)
        for src, tgt_in, tgt_out in loader:
            logits = model(src, tgt_in)
            loss = criterion(logits.flatten(0, 1), tgt_out.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if LOCAL_RANK == 0:
            print(f"Epoch: {epoch}, train loss: {loss:.3f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
