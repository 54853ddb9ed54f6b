"""plait plans, proves and runs the training of language models on whatever machines there are."""
