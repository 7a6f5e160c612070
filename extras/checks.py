"""What can be wrong with a run, said in one line each. No part of the algorithm.

A Refusal is a setting or an input that cannot work (exit code 2), anything else a failure (exit code 1).
"""

import argparse
import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer, HfArgumentParser

from rewards import gold_answer


class Refusal(Exception):
    """A setting or an input that cannot work. Its text names the value, and what would be right."""


class Parser(argparse.ArgumentParser):
    """For a script: its help is `doc`, and a wrong argument is a Refusal, not a page of usage."""

    def __init__(self, doc: str):
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(description=doc, formatter_class=form, allow_abbrev=False)

    def error(self, message: str):
        raise Refusal(f"{message}; --help explains all settings")


def parse(config_class: type, description: str, arguments: list[str] | None = None):
    """The settings from `arguments`, those of the command line if it is None."""

    class Settings(HfArgumentParser):
        error = Parser.error

    parser = Settings(config_class, description=description.partition("\n")[0], allow_abbrev=False)
    options = dict(look_for_args_file=False, return_remaining_strings=True)
    cfg, unknown = parser.parse_args_into_dataclasses(arguments, **options)
    if unknown:
        raise Refusal(f"there is no setting {unknown[0]}; --help explains all settings")
    return cfg


def explained(run: Callable[[], int], program: str = "pods.py", trains: bool = True) -> int:
    """The exit code of run(), where what is known to go wrong ends in one line on stderr."""
    try:
        return run()
    except Refusal as error:
        message, code = str(error), 2
    except KeyboardInterrupt:
        message, code = "interrupted" + " before the first step" * trains, 130
    except FloatingPointError as error:
        message, code = str(error) + ". The last checkpoint is good; a lower --lr may help" * trains, 1
    except (OSError, SafetensorError) as error:
        saved = ". The last checkpoint is whole: once this is mended, the same command goes on"
        message, code = str(error) + saved * trains, 1
    except (MemoryError, RuntimeError) as error:
        of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not of_memory and "can't allocate memory" not in str(error):
            raise
        hint = "lower --micro-batch-tokens, turn on --gradient-checkpointing, or take a smaller --model"
        message, code = "out of memory" + f": {hint}. The last checkpoint is whole" * trains, 1
    print(f"{program}: {' '.join(message.split())}", file=sys.stderr)
    return code


def check_settings(cfg) -> None:
    """Raises Refusal for the first setting that cannot work, whatever the model and the data are."""

    def refuse(name: str, must: str):
        raise Refusal(f"--{name.replace('_', '-')} is {getattr(cfg, name)!r}, but must be {must}")

    least = dict(
        n=1, prompts_per_step=1, max_prompt_tokens=1, max_new_tokens=1, updates_per_batch=1, eval_every=1
    )
    least |= dict(save_every=1, max_steps=0, max_minutes=0, eval_problems=0, kl=0, weight_decay=0, seed=0)
    for name, value in least.items():
        if not value <= getattr(cfg, name) < math.inf:
            refuse(name, f"a number from {value}")
    for name in ("temperature", "lr", "clip", "max_grad_norm"):
        if not 0 < getattr(cfg, name) < math.inf:
            refuse(name, "a number above 0")
    if not 1 <= cfg.m <= cfg.n:
        refuse("m", f"from 1 to --n, which is {cfg.n}")
    if not 0 < cfg.gpu_memory_utilization < 1:
        refuse("gpu_memory_utilization", "between 0 and 1")
    longest = cfg.max_prompt_tokens + cfg.max_new_tokens
    if cfg.micro_batch_tokens < longest:
        refuse("micro_batch_tokens", f"at least --max-prompt-tokens and --max-new-tokens together, {longest}")
    check_name(cfg.name)


def check_name(name: str) -> None:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        must = "a plain folder name: the run's files go to runs/NAME"
        raise Refusal(f"--name is {name!r}, but must be {must}")


def read_problems(path: Path) -> list[dict]:
    """The problems of a JSONL file. Raises Refusal that names file and line for the first bad one."""
    if not path.is_file():
        raise Refusal(
            f"--data: no file {path}; it must be gsm8k, easy, or a folder with train.jsonl and test.jsonl"
        )
    problems = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                problem = {"question": str(row["question"]), "answer": str(row["answer"])}
                gold_answer(problem["answer"])
            except (ValueError, KeyError, TypeError) as error:
                what = f"lacks {error}" if isinstance(error, KeyError) else f"cannot be used: {error}"
                form = '{"question": "...", "answer": "... #### 7"}'
                raise Refusal(f"{path}, line {number} {what}; each line must be {form}") from None
            problems.append(problem)
    if not problems:
        raise Refusal(f"{path} is empty; it must hold at least one problem")
    return problems


def check_lengths(lengths: list[int], most: int) -> None:
    """Says how many prompts are longer than `most` tokens and are left out. Raises Refusal if all are."""
    left_out = sum(length > most for length in lengths)
    if left_out == len(lengths):
        raise Refusal(f"--max-prompt-tokens is {most}, but the shortest prompt has {min(lengths)} tokens")
    if left_out:
        print(f"Left out {left_out} of {len(lengths)} problems: their prompts have more than {most} tokens.")


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def fetch(setting: str, load: Callable, source: str, *args, **kwargs):
    """load(source, ...), from a folder or the hub. Raises Refusal that says how to do without the hub."""
    try:
        return load(source, *args, **kwargs)
    except (OSError, ValueError) as error:
        raise Refusal(
            f"{setting}: could not load {source} ({first_line(error)}); without the Hugging Face hub, give a"
            f" local folder as {setting}"
        ) from None


def started(start: Callable, cfg, on_gpu: bool):
    """start(cfg, on_gpu), the engine. Raises Refusal if it cannot compile, or has too little memory."""
    compiler, compiles = os.environ.get("CXX", "g++"), not (on_gpu or cfg.eager)
    if compiles and not shutil.which(compiler):
        raise Refusal(
            f"vLLM compiles for the CPU with {compiler}, and there is none; without it, add --eager"
        )
    if compiles and " " in torch.__file__:
        raise Refusal(f"torch cannot compile from a path with a space, {torch.__file__}; add --eager")
    try:
        return start(cfg, on_gpu)
    except ValueError as error:
        hint = "lower --max-new-tokens or change --gpu-memory-utilization, and see what else uses the GPU"
        raise Refusal(f"vLLM cannot start with these settings ({first_line(error)}); {hint}") from None


def load_tokenizer(cfg):
    """The model's tokenizer. Raises Refusal if the model is missing, cannot chat, or has a short context."""
    trust = dict(trust_remote_code=cfg.trust_remote_code)
    tokenizer = fetch("--model", AutoTokenizer.from_pretrained, cfg.model, **trust)
    # A folder without tokenizer files does not fail to load: it gives a tokenizer that knows no words.
    if tokenizer.decode(tokenizer.encode("2 + 2", add_special_tokens=False)).split() != ["2", "+", "2"]:
        raise Refusal(f"--model {cfg.model} has no working tokenizer; its folder needs the files of one")
    if not tokenizer.chat_template:
        raise Refusal(
            f"--model {cfg.model} has no chat template; take a chat model, often called ...-Instruct"
        )
    config = fetch("--model", AutoConfig.from_pretrained, cfg.model, **trust)
    longest = cfg.max_prompt_tokens + cfg.max_new_tokens
    if longest > config.max_position_embeddings:
        raise Refusal(
            f"--max-prompt-tokens and --max-new-tokens make {longest} together, but {cfg.model} has a"
            f" context of {config.max_position_embeddings}"
        )
    return tokenizer


class Watch:
    """Shows a step in the bar. Warns, once each, of what training would go on with in silence."""

    def __init__(self, cfg, bar: tqdm):
        self.cfg, self.bar, self.say, self.idle_steps = cfg, bar, bar.write, 0
        self.truncated_said = self.gap_said = False

    def __call__(self, metrics: dict) -> None:
        self.bar.set_postfix_str(
            "reward {reward_mean:.2f}, accuracy {accuracy:.0%}, generate {generate_seconds:.0f} s, "
            "update {update_seconds:.0f} s".format(**metrics)
        )
        self.bar.update()
        if metrics["truncated"] > 0.5 and not self.truncated_said:
            self.truncated_said = True
            self.say(
                f"Warning: {metrics['truncated']:.0%} of the rollouts are cut off; raise --max-new-tokens"
            )
        if metrics["logprob_gap"] > 0.3 and not self.gap_said:
            self.gap_said = True
            self.say(
                f"Warning: log-probs of vLLM and trainer differ by {metrics['logprob_gap']:.2f} nats a token;"
                " vLLM may not have the trained weights"
            )
        idle = metrics["groups_skipped"] == self.cfg.prompts_per_step
        self.idle_steps = self.idle_steps + 1 if idle or self.idle_steps >= 20 else 0
        if self.idle_steps == 20:
            self.say(
                "Warning: for 20 steps the rewards in each group were equal, so nothing was learned;"
                " the problems are too hard or too easy for this model"
            )
