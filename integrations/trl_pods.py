"""PODS inside TRL: the rules of sampling.py, where TRL distributes the training.

Run it as a module from the root of the repository, so that it finds rewards.py and sampling.py:

    accelerate launch --num_processes 8 -m integrations.trl_pods grpo --m 16 --num_generations 64 \\
        --model Qwen/Qwen2.5-3B-Instruct --per_device_train_batch_size 16 \\
        --gradient_accumulation_steps 8

The first argument is grpo or rloo. All settings but --model, --m, --rule and --data are TRL's.

TRL generates n = --num_generations completions of each prompt, of which the rule keeps m. The
rewards of the others become NaN, TRL's mark of what no function could score: so it leaves them out
of the group's mean and deviation (grpo) or of the mean of the others (rloo), and the advantages are
those within the subset. Then their rows are dropped, and a micro-batch of the update is
--per_device_train_batch_size * m / n completions.
"""

import sys
from dataclasses import dataclass, field
from typing import Literal

import torch
from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetsError
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, TrlParser
from trl import __version__ as version

from rewards import build_messages, gold_answer, reward
from sampling import RULES

# TRL has no public place between a reward and its advantage: two private methods of it are wrapped.
TESTED = "1.16.0"  # before another, run tests/test_trl_pods.py with it


class DownSampled:
    """Goes before a trainer of TRL in a class: keeps m of its num_generations completions.

    For text, not images. Raises ValueError where a process would not hold whole groups or not keep
    as many in each micro-batch. The rule sees TRL's weighted sum of rewards, before RLOO's clip and
    KL. What runs before there are rewards (old log-probs, a reference model) sees all n.
    """

    def __init__(self, *args, m: int, rule: str = "max_variance", **kwargs):
        if version != TESTED:
            raise ValueError(f"TRL is {version}, but must be {TESTED}")
        super().__init__(*args, **kwargs)
        n, steps = self.num_generations, self.args.steps_per_generation
        generated = self.args.per_device_train_batch_size * steps
        if not 2 <= m <= n:  # one alone has no advantage
            raise ValueError(f"m is {m}, but must be from 2 to num_generations, which is {n}")
        if generated % n:
            raise ValueError(f"a process generates {generated} at a time: no whole groups of {n}")
        if (kept := generated // n * m) % steps:
            raise ValueError(f"a process keeps {kept}, not a multiple of its {steps} micro-batches")
        self.m, self.rule = m, rule

    def _calculate_rewards(self, inputs, *args) -> torch.Tensor:
        """(completions of all processes, reward functions), NaN for those that are not kept."""
        scores = super()._calculate_rewards(inputs, *args)
        if not self._selects:
            return scores
        accelerator = self.accelerator
        own = scores.view(accelerator.num_processes, len(inputs), -1)[accelerator.process_index]
        rewards = (own * self.reward_weights.to(own.device)).nansum(-1)
        rewards = rewards.masked_fill(own.isnan().all(-1), torch.nan)  # which the rules refuse
        kept = RULES[self.rule](rewards.view(-1, self.num_generations), self.m)  # (groups, m)
        mask = torch.zeros(len(kept), self.num_generations, dtype=torch.bool, device=own.device)
        self._kept = mask.scatter(1, kept, True).flatten()  # (len(inputs),)
        return scores.masked_fill(~accelerator.gather(self._kept)[:, None], torch.nan)

    def _generate_and_score_completions(self, inputs) -> dict[str, torch.Tensor]:
        """What TRL makes of `inputs`, without the rows of the completions that were not kept."""
        self._selects = self.model.training  # asked before TRL generates: that may change it
        batch = super()._generate_and_score_completions(inputs)
        if not self._selects:
            return batch
        batch = {key: rows[self._kept] if rows.ndim else rows for key, rows in batch.items()}
        if "num_items_in_batch" in batch:  # the tokens that all processes divide the loss by
            tokens = (batch["completion_mask"] * batch.get("tool_mask", 1)).sum()
            batch["num_items_in_batch"] = self.accelerator.gather(tokens).sum()
        return batch


class PodsGRPO(DownSampled, GRPOTrainer):
    pass


class PodsRLOO(DownSampled, RLOOTrainer):
    """With beta = 0, an advantage is a kept reward minus the mean of the other kept ones."""


ALGORITHMS = {"grpo": (PodsGRPO, GRPOConfig), "rloo": (PodsRLOO, RLOOConfig)}


@dataclass
class Settings:
    model: str = field(metadata={"help": "name on the Hugging Face hub, or a folder"})
    m: int = field(metadata={"help": "completions kept of the --num_generations of each prompt"})
    rule: Literal[tuple(RULES)] = field(default="max_variance", metadata={"help": "which m"})
    data: str = field(default="gsm8k", metadata={"help": "gsm8k, or a folder with train.jsonl"})


class Parser(TrlParser):
    def error(self, message: str):  # argparse would print a page of usage
        raise ValueError(message)


def load_problems(data: str) -> Dataset:
    """Rows of a prompt (messages) and an answer (text)."""
    files = None if data == "gsm8k" else f"{data}/train.jsonl"
    source = ["json"] if files else ["openai/gsm8k", "main"]
    try:
        problems = load_dataset(*source, data_files=files, split="train")
    except (DatasetsError, StopIteration) as error:  # datasets stops like that at an empty file
        why = error.__cause__ or str(error) or "it is empty"
        raise ValueError(f"--data: cannot read {files or data}: {why}") from None
    if not {"question", "answer"} <= set(problems.column_names):
        raise ValueError(f"--data: {files} has {problems.column_names}, not question and answer")

    def as_prompt(row: dict) -> dict:
        return {"prompt": build_messages(row["question"]), "answer": gold_answer(row["answer"])}

    return problems.map(as_prompt, remove_columns=problems.column_names)


def score(completions, answer: list[str], log_metric, **_) -> list[float]:
    """TRL logs the mean reward of what was kept; that of all is logged here."""
    rewards = [reward(c[0]["content"], gold) for c, gold in zip(completions, answer)]
    log_metric("reward_of_all", sum(rewards) / len(rewards))
    return rewards


def main() -> int:
    """The exit code: 2 with one line on stderr for what cannot be trained."""
    algorithm, *arguments = sys.argv[1:] or [""]
    if algorithm in ("-h", "--help"):
        print(__doc__)
        return 0
    try:
        if algorithm not in ALGORITHMS:
            raise ValueError(f"the first argument is {algorithm!r}, but must be grpo or rloo")
        trainer_class, config_class = ALGORITHMS[algorithm]
        settings, args = Parser((Settings, config_class)).parse_args_and_config(arguments)
        data = load_problems(settings.data)
        trainer = trainer_class(settings.model, score, args, data, m=settings.m, rule=settings.rule)
    except (ValueError, OSError) as error:
        print(f"trl_pods: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    return 0


if __name__ == "__main__":
    sys.exit(main())
