"""A training of transformers' own Trainer, as a user's script has it."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

config = GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=8, n_positions=4)
tokens = torch.tensor([1, 2, 3])
arguments = TrainingArguments("out", max_steps=1, learning_rate=0.125, report_to=[], use_cpu=True, save_strategy="no")
Trainer(GPT2LMHeadModel(config), arguments, train_dataset=[{"input_ids": tokens, "labels": tokens}]).train()
