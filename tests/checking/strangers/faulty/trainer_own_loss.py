"""HF Trainer with a compute_loss of our own (label smoothing over all tokens) and accumulation."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Tokens(torch.utils.data.Dataset):
    def __init__(self, n=256, length=16, vocab=64):
        g = torch.Generator().manual_seed(2)
        self.ids = torch.randint(0, vocab, (n, length), generator=g)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


class SmoothedTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        shift_logits = outputs.logits[:, :-1, :].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(shift_logits, labels[:, 1:].flatten(), label_smoothing=0.1)
        return (loss, outputs) if return_outputs else loss


def main():
    set_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    model = GPT2LMHeadModel(config)
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        max_steps=8,
        learning_rate=1e-3,
        logging_steps=2,
        save_strategy="no",
        report_to="none",
        max_grad_norm=0.0,
        use_cpu=True,
    )
    SmoothedTrainer(model=model, args=args, train_dataset=Tokens()).train()


if __name__ == "__main__":
    main()
