"""Trains four steps with TRL's GRPOTrainer, and prints the causes of each step and a digest of the weights as JSON.

python -m tests.rl.train_with_trl FOLDER TEMPERATURE [watched]
"""

import json
import sys
from pathlib import Path

import torch
import trl
from datasets import Dataset
from datasets.table import InMemoryTable
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.rl.loop import new_model
from trainermon import rl
from trainermon.rl.trl import attach


def tokenizer():
    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(195))]
    fast = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


class Engine:
    """The trained model in bfloat16, which samples at a temperature of its own."""

    def __init__(self, temperature):
        self.temperature = temperature
        self.generator = torch.Generator().manual_seed(0)
        self.model = new_model().to(torch.bfloat16)

    @torch.no_grad()
    def __call__(self, prompts, trainer):
        self.model.load_state_dict(trainer.model.state_dict())
        encoded = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        sampled = {"prompt_ids": encoded, "completion_ids": [], "logprobs": []}
        for prompt in encoded:
            ids, logprobs = list(prompt), []
            for _ in range(12):
                logits = self.model(torch.tensor([ids])).logits[0, -1].float() / self.temperature
                token = int(torch.multinomial(logits.softmax(-1), 1, generator=self.generator))
                logprobs.append(float(logits.log_softmax(-1)[token]))
                ids.append(token)
            sampled["completion_ids"].append(ids[len(prompt) :])
            sampled["logprobs"].append(logprobs)
        return sampled


def number_of_words(completions, **_):
    return [float(len(set(str(each).split()))) for each in completions]


def main(folder, temperature, *, watched):
    arguments = trl.GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=16,
        num_generations=4,
        num_iterations=2,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        max_completion_length=12,
        max_steps=4,
        learning_rate=1e-4,
        temperature=1.0,
        beta=0.0,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_strategy="no",
        seed=0,
    )
    prompts = {"prompt": [f"w{n} w{n + 1} w{n + 2}" for n in range(64)]}
    trainer = trl.GRPOTrainer(
        model=new_model(),
        args=arguments,
        processing_class=tokenizer(),
        train_dataset=Dataset(InMemoryTable.from_pydict(prompts), fingerprint="prompts"),
        reward_funcs=number_of_words,
        rollout_func=Engine(temperature),
    )
    watch = rl.Watch(folder / "rl_out", rank=0, limits=rl.Limits(min_sequences=16))
    attached = attach(trainer, watch) if watched else None
    trainer.train()
    watch.close()
    if attached is not None:
        attached.detach()
    reports = [report for report in map(watch.report, range(4)) if report is not None]
    told = {
        "causes": [[str(cause.cause) for cause in report.causes] for report in reports],
        "weights": {name: each.total for name, each in rl.digest_tensors(trainer.model.state_dict()).items()},
        "failures": watch.num_failures,
        "detached": "_generate_and_score_completions" not in vars(trainer),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), watched="watched" in sys.argv)
