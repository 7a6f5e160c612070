"""PODS inside TRL: the same selection where TRL distributes the training, by DDP, FSDP or DeepSpeed.

    accelerate launch --num_processes 8 extras/trl_pods.py grpo --model Qwen/Qwen2.5-3B-Instruct --m 16 \\
        --num_generations 64 --per_device_train_batch_size 16 --gradient_accumulation_steps 8

TRL generates n = --num_generations completions of each prompt, of which the rule keeps m. The rewards of the
others become NaN, TRL's mark of what no function could score: so it leaves them out of the group's mean and
deviation (grpo) or of the mean of the others (rloo), and the advantages are those within the subset. Then
their rows are dropped, and a micro-batch is --per_device_train_batch_size * m / n completions.

The first argument is the algorithm, grpo or rloo. Settings other than --model, --m, --rule, --data are TRL's.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from datasets import Dataset, load_dataset
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, TrlParser
from trl import __version__ as version

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from extras import checks
from rewards import build_messages, gold_answer, reward
from sampling import RULES

# TRL has no public place between a reward and its advantage. These are private, and exist in 1.16.0.
WRAPPED = ("_calculate_rewards", "_generate_and_score_completions")


class DownSampled:
    """Goes before a trainer of TRL in a class: keeps m of its num_generations completions, by `rule`.

    Raises Refusal where a process would not hold whole groups, or as many kept in each micro-batch, and where
    this TRL differs from 1.16.0. The rule sees TRL's weighted sum of rewards, before RLOO's clip and KL, and
    takes no NaN. Forward passes before there are rewards (old log-probs, a reference model) see all n.
    """

    def __init__(self, *args, m: int, rule: str = "max_variance", **kwargs):
        for name in WRAPPED:
            if not callable(getattr(super(), name, None)):
                raise checks.Refusal(f"TRL {version} has no {name}: DownSampled needs TRL 1.16.0")
        super().__init__(*args, **kwargs)
        n, steps = self.num_generations, self.args.steps_per_generation
        generated = self.args.per_device_train_batch_size * steps
        if not 2 <= m <= n:  # one alone has no advantage
            raise checks.Refusal(f"m is {m}, but must be from 2 to num_generations, which is {n}")
        if generated % n:
            raise checks.Refusal(
                f"per_device_train_batch_size x steps_per_generation is {generated}: no whole groups of {n}"
            )
        if generated // n * m % steps:
            raise checks.Refusal(
                f"a process keeps {generated // n * m}, which {steps} (steps_per_generation) does not divide"
            )
        self.m, self.rule = m, rule

    def _calculate_rewards(self, inputs, *args) -> torch.Tensor:
        """(completions of all processes, reward functions), NaN for those that the rule does not keep."""
        scores = super()._calculate_rewards(inputs, *args)
        if not self._selects:
            return scores
        own = scores.view(self.accelerator.num_processes, len(inputs), -1)[self.accelerator.process_index]
        rewards = (own * self.reward_weights.to(own.device)).nansum(-1)
        rewards = rewards.masked_fill(own.isnan().all(-1), torch.nan)  # which the rules refuse
        kept = RULES[self.rule](rewards.view(-1, self.num_generations), self.m)  # (groups, m)
        mask = torch.zeros(len(kept), self.num_generations, dtype=torch.bool, device=own.device)
        self._kept = mask.scatter(1, kept, True).flatten()  # (count,)
        return scores.masked_fill(~self.accelerator.gather(self._kept)[:, None], torch.nan)

    def _generate_and_score_completions(self, inputs) -> dict[str, torch.Tensor]:
        """What TRL makes of `inputs`, without the rows of the completions that were not kept."""
        self._selects = self.model.training  # asked before TRL generates: that may change it
        batch = super()._generate_and_score_completions(inputs)
        if not self._selects:
            return batch
        if "num_images" in batch:
            raise checks.Refusal("DownSampled takes text only: images are not stored a row a completion")
        if batch["advantages"][~self._kept].any():
            raise checks.Refusal(f"TRL {version} gives an advantage to a reward that is NaN: use TRL 1.16.0")
        batch = {key: rows[self._kept] if rows.ndim else rows for key, rows in batch.items()}
        if "num_items_in_batch" in batch:  # the tokens that the loss is divided by, in all processes
            tokens = (batch["completion_mask"] * batch.get("tool_mask", 1)).sum()
            batch["num_items_in_batch"] = self.accelerator.gather(tokens).sum()
        return batch


class PodsGRPO(DownSampled, GRPOTrainer):
    pass


class PodsRLOO(DownSampled, RLOOTrainer):
    """With beta = 0, a kept completion's advantage is its reward minus the mean of the other kept ones'."""


ALGORITHMS = {"grpo": (PodsGRPO, GRPOConfig), "rloo": (PodsRLOO, RLOOConfig)}


@dataclass
class Settings:
    model: str = field(metadata={"help": "name on the Hugging Face hub, or a folder"})
    m: int = field(metadata={"help": "completions kept of the --num_generations of each prompt"})
    rule: Literal[tuple(RULES)] = field(default="max_variance", metadata={"help": "which m are kept"})
    data: str = field(default="gsm8k", metadata={"help": "gsm8k, or a folder with train.jsonl"})


class Parser(TrlParser):
    error = checks.Parser.error


def load_problems(data: str) -> Dataset:
    """Rows of a prompt (messages) and an answer (text)."""
    if data == "gsm8k":
        problems = load_dataset("openai/gsm8k", "main", split="train")
    else:
        problems = Dataset.from_list(checks.read_problems(Path(data) / "train.jsonl"))
    row = lambda p: {"prompt": build_messages(p["question"]), "answer": gold_answer(p["answer"])}
    return problems.map(row, remove_columns=problems.column_names)


def score(completions, answer: list[str], log_metric, **_) -> list[float]:
    """TRL logs the mean reward of what was kept; that of all is logged here."""
    rewards = [reward(completion[0]["content"], gold) for completion, gold in zip(completions, answer)]
    log_metric("reward_of_all", sum(rewards) / len(rewards))
    return rewards


def main() -> int:
    algorithm, *arguments = sys.argv[1:] or [""]
    if algorithm in ("-h", "--help"):
        print(__doc__)
        return 0
    if algorithm not in ALGORITHMS:
        raise checks.Refusal(f"the first argument is {algorithm!r}, but must be grpo or rloo")
    trainer_class, config_class = ALGORITHMS[algorithm]
    try:
        settings, args = Parser((Settings, config_class)).parse_args_and_config(arguments)
        data = load_problems(settings.data)
        trainer = trainer_class(settings.model, score, args, data, m=settings.m, rule=settings.rule)
    except ValueError as error:  # TRL's, of its settings
        raise checks.Refusal(str(error)) from None
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    return 0


if __name__ == "__main__":
    sys.exit(checks.explained(main, "trl_pods.py", trains=False))
