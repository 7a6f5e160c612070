"""GRPO with down-sampled rollouts (PODS, arXiv 2504.13818): sample n per prompt, update on m.

    bash run_gsm8k.sh          sets everything up and runs this file
    python pods.py --help      explains every setting

Read it from top to bottom. The order is that of the data in one training step:

    problems -> n rollouts per prompt (vLLM, in this process) -> rewards -> m of n (sampling.py)
             -> advantages -> clipped loss -> AdamW on all weights -> weights into vLLM

What textbook GRPO has and this file leaves out: the KL penalty with its reference model (the
paper trains without it, too), LoRA, and more than one GPU.
"""

import os

# Set before vllm is imported. Otherwise the engine runs in a child process: we could not reach its
# weights (vllm#16434), and it could outlive us (vllm#55510).
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import fcntl
import json
import math
import random
import re
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch
from datasets import load_dataset
from jinja2 import TemplateError
from safetensors import SafetensorError
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, set_seed
from transformers.utils import logging
from vllm import LLM, SamplingParams

from rewards import build_messages, gold_answer, is_correct, is_well_formed, reward
from sampling import RULES

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LOGITS_AT_ONCE = 512  # tokens
REPORT = "step {step}: test accuracy {eval/accuracy:.1%}, format {eval/format:.1%}"


class Refusal(Exception):
    """A setting or an input that cannot work. The message names it, and what is allowed."""


@contextmanager
def as_refusal(what: str, *errors: type[Exception]):
    """Re-raises these errors of a library as a Refusal: `what`, then the library's message."""
    try:
        yield
    except errors as error:
        raise Refusal(f"{what} ({' '.join(str(error).split())[:400]})") from None


# ----- Settings


def setting(default, help: str):
    return field(default=default, metadata={"help": help})


@dataclass
class Config:
    """Every setting once, with its default and its meaning, which --help prints."""

    # What to learn
    model: str = setting("Qwen/Qwen2.5-0.5B-Instruct", "a chat model: hub name or folder")
    data: str = setting("gsm8k", "gsm8k (from the hub), or a folder with {train,test}.jsonl")
    output_dir: str = setting("runs/gsm8k", "folder of the run: logs, checkpoint, trained model")
    seed: int = setting(0, "decides the order of the problems and the sampling")

    # Down-sampling
    n: int = setting(64, "rollouts per prompt (TRL: num_generations; verl: rollout.n)")
    m: int = setting(16, "rollouts kept of the n, to update on; m = n is plain GRPO")
    rule: Literal[tuple(RULES)] = setting("max_variance", "which m of the n")
    normalize_over: Literal["kept", "all"] = setting("kept", "advantages: mean and std over these")

    # Rollouts
    prompts_per_step: int = setting(4, "prompts per step; verl: train_batch_size")
    temperature: float = setting(1.0, "of the sampling, and of the policy that is trained")
    max_new_tokens: int = setting(512, "longer completions are cut off")
    example: bool = setting(False, "show a solved problem first: very small models need one")

    # Update
    lr: float = setting(1e-6, "learning rate of AdamW, constant")
    weight_decay: float = setting(0.0, "of AdamW")
    clip_eps: float = setting(0.2, "clip ratio: pi / pi_old is clipped to 1 +- this")
    updates_per_batch: int = setting(1, "optimizer steps per batch; TRL: num_iterations")
    max_grad_norm: float = setting(1.0, "a longer gradient is scaled down to this norm")
    micro_batch_tokens: int = setting(2048, "tokens per forward pass; a longer rollout goes alone")
    gradient_checkpointing: bool = setting(False, "recompute activations: saves memory, not time")
    dtype: Literal["bfloat16", "float32"] = setting(
        "bfloat16", "of vLLM and autocast; weights are float32"
    )
    gpu_memory_utilization: float = setting(0.35, "vLLM's share of the GPU while it generates")

    # Length of the run
    max_steps: int = setting(500, "steps in all")
    eval_every: int = setting(50, "steps between evaluations; there is one before and one after")
    save_every: int = setting(10, "steps between checkpoints; the same command resumes")


class Parser(HfArgumentParser):
    def error(self, message: str):
        raise Refusal(f"{message}; --help explains all settings")


def parse_settings(arguments: list[str] | None = None) -> Config:
    """The settings in `arguments`, by default those of the command line. May raise Refusal."""
    parser = Parser(Config, description=__doc__.partition("\n")[0], allow_abbrev=False)
    cfg = Config(**vars(parser.parse_args(arguments)))
    for name, value in vars(cfg).items():
        least = {"seed": 0, "max_steps": 0, "temperature": 0.01}.get(name, type(value) is int)
        if type(value) in (int, float) and not least <= value < math.inf:
            raise Refusal(f"--{name} is {value}, but must be a number from {least:.2g}")
    if not 2 <= cfg.m <= cfg.n:  # one alone has no spread, and so no advantage
        raise Refusal(f"--m is {cfg.m}, but must be from 2 to --n, which is {cfg.n}")
    return cfg


# ----- Problems


def read_problems(data: str, split: str) -> list[dict]:
    """The problems of a split, in order: {"question": text, "gold": the right number, as text}.

    Raises Refusal, for a bad line with the file's name and the line's number.
    """
    path, problems = Path(data) / f"{split}.jsonl", []
    if data == "gsm8k":
        with as_refusal("--data: cannot load GSM8K from the hub", OSError, ValueError):
            rows = list(load_dataset("openai/gsm8k", "main", split=split))
    else:
        rows = path.read_bytes().splitlines() if path.is_file() else []
    if not rows:
        raise Refusal(f"--data: {path} is missing or empty; give gsm8k, or a folder that has it")
    for number, row in enumerate(rows, start=1):
        what = f'{path}, line {number} is not like {{"question": "...", "answer": "... #### 7"}}'
        with as_refusal(what, ValueError, KeyError, TypeError, AttributeError):
            row = json.loads(row) if isinstance(row, bytes) else row  # bytes may have a BOM
            gold = gold_answer(row["answer"])
            problems.append({"question": row["question"].strip(), "gold": gold})
    return problems


def encode(questions: list[str], tokenizer, example: bool) -> list[list[int]]:
    """The prompt of each question, as token ids."""

    def prompts(system_role: bool) -> list[list[int]]:
        chats = [build_messages(question, example, system_role) for question in questions]
        return tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)

    try:
        return prompts(system_role=True)
    except TemplateError:  # a template that refuses system messages, like Gemma's
        return prompts(system_role=False)


def load_problems(cfg: Config, tokenizer, split: str) -> list[dict]:
    """The problems of the "train" or "test" split, each with its "prompt_ids", a list of int."""
    problems = read_problems(cfg.data, split)
    prompts = encode([problem["question"] for problem in problems], tokenizer, cfg.example)
    return [problem | {"prompt_ids": ids} for problem, ids in zip(problems, prompts)]


def problems_of_step(problems: list[dict], cfg: Config, step: int) -> list[dict]:
    """The problems of step 1, 2, ...: passes over all of them, each shuffled from the seed."""
    count, size = len(problems), cfg.prompts_per_step
    passes = [divmod(i, count) for i in range((step - 1) * size, step * size)]
    return [random.Random(f"{cfg.seed}/{p}").sample(problems, count)[i] for p, i in passes]


# ----- Rollouts


@dataclass
class Rollout:
    prompt_ids: list[int]
    completion_ids: list[int]  # as sampled, never tokenised again; ends in eos unless truncated
    old_logprobs: list[float]  # log pi_old of each completion token; pi_old is vLLM's own policy
    text: str
    truncated: bool  # cut off at max_new_tokens; graded like any other
    correct: bool
    well_formed: bool
    reward: float
    kept: bool = False
    advantage: float = 0.0


def start_engine(cfg: Config, problems: list[dict]) -> LLM:
    """vLLM in this process, for the prompts of these problems.

    Starting it reseeds the global generators, so seed after it. Raises Refusal, with vLLM's own
    words, if it cannot run this model on this machine.
    """
    if DEVICE.type == "cuda":
        options = dict(gpu_memory_utilization=cfg.gpu_memory_utilization, enable_sleep_mode=True)
        if torch.cuda.get_device_capability()[0] == 10:  # B200: vLLM's choice there wants nvcc
            options["attention_backend"] = "TRITON_ATTN"
    else:
        # Compiling costs more than the demonstration saves by it; vLLM compiles parts of its
        # sampling all the same, which the stance prevents. Small blocks, because rollouts share
        # whole blocks of their prompt only: of a short prompt, blocks of 128 tokens share nothing.
        options = dict(enforce_eager=True, kv_cache_memory_bytes=2**30, block_size=32)
        torch.compiler.set_stance("force_eager")
    # Processed log-probs include the temperature: those of the policy that samples (trl#4159).
    options |= dict(logprobs_mode="processed_logprobs", use_tqdm_on_load=False, dtype=cfg.dtype)
    longest = max(len(problem["prompt_ids"]) for problem in problems) + cfg.max_new_tokens
    with as_refusal(f"vLLM cannot run {cfg.model} here", ValueError, RuntimeError, AssertionError):
        llm = LLM(cfg.model, max_model_len=longest, **options)
        # Some back ends fail only at the first call, for a head size that they lack for one.
        llm.generate({"prompt_token_ids": [0]}, SamplingParams(max_tokens=1), use_tqdm=False)
    return llm


def generate(llm: LLM, problems: list[dict], n: int, temperature: float, max_tokens: int):
    """n graded rollouts of each problem, list[list[Rollout]]. Token ids go in and come out.

    Ids, because vLLM would put a second BOS before a templated string (vllm#16976). Random numbers
    come from a global generator, which the caller seeds: a seed for each request is slow, and
    fails on a CPU.
    """
    # The prefix cache holds keys and values of the old weights (vllm#9744): empty it.
    if not llm.reset_prefix_cache():
        raise RuntimeError("vLLM kept its prefix cache, and with it keys of older weights")
    # What is not given is off, whatever the model's generation_config says: with a top-k, rollouts
    # would come from another policy than the one that is trained. logprobs=0: of sampled tokens.
    params = SamplingParams(n=n, temperature=temperature, max_tokens=max_tokens, logprobs=0)
    prompts = [{"prompt_token_ids": problem["prompt_ids"]} for problem in problems]

    def graded(item: dict, out) -> Rollout:
        ids, text, cut_off = list(out.token_ids), out.text, out.finish_reason == "length"
        logprobs = [at[token].logprob for token, at in zip(ids, out.logprobs)]
        grades = is_correct(text, item["gold"]), is_well_formed(text), reward(text, item["gold"])
        return Rollout(item["prompt_ids"], ids, logprobs, text, cut_off, *grades)

    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[graded(p, out) for out in output.outputs] for p, output in zip(problems, outputs)]


# ----- Selection and advantages


def advantages(rewards: torch.Tensor, kept: torch.Tensor, over: str = "kept") -> torch.Tensor:
    """Advantages (prompts, m) of float64 rewards (prompts, n) at the kept indices (prompts, m).

        A_i = (r_i - mean) / (std + 1e-4)    for i in S, the kept subset

    with mean and std over S (over="kept", the paper's choice) or over all n (over="all"). The std
    is that of the population. Equal rewards give exactly 0, and not the rounding error of their
    mean, which a division by 1e-4 would enlarge.

    In numbers: of the rewards 0.4 1.0 0.0 0.6, max-variance keeps 1.0 and 0.0. Over the kept, mean
    and std are 0.5, so A is 0.5 / 0.5001 = 0.9998 and -0.9998. Over all four, the std is 0.3606,
    and A is 1.386 and -1.386.
    """
    kept_rewards = rewards.gather(-1, kept)
    base = kept_rewards if over == "kept" else rewards
    mean, std = base.mean(-1, keepdim=True), base.std(-1, correction=0, keepdim=True)
    varied = base.amax(-1, keepdim=True) > base.amin(-1, keepdim=True)
    return torch.where(varied, (kept_rewards - mean) / (std + 1e-4), 0.0)


def down_sample(groups: list[list[Rollout]], cfg: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Marks m of the n rollouts of each group as kept, and gives these their advantages.

    Returns all rewards (prompts, n), float64, and the indices of the kept (prompts, m).
    """
    rewards = torch.tensor([[r.reward for r in group] for group in groups], dtype=torch.float64)
    kept = RULES[cfg.rule](rewards, cfg.m)
    A = advantages(rewards, kept, cfg.normalize_over)
    for group, indices, values in zip(groups, kept.tolist(), A.tolist()):
        for i, value in zip(indices, values):
            group[i].kept, group[i].advantage = True, value
    return rewards, kept


# ----- Log-probs of the policy that is trained


def micro_batches(rollouts: list[Rollout], max_tokens: int) -> list[list[Rollout]]:
    """The rollouts cut into micro-batches, in order: each is of one prompt, so that `pack` computes
    the prompt once, and of at most max_tokens, unless a single rollout is longer."""
    batches, tokens = [], 0
    for rollout in rollouts:
        tokens += len(rollout.completion_ids)
        if not batches or batches[-1][0].prompt_ids != rollout.prompt_ids or tokens > max_tokens:
            batches.append([])
            tokens = len(rollout.prompt_ids) + len(rollout.completion_ids)
        batches[-1].append(rollout)
    return batches


def pack(batch: list[Rollout]) -> tuple[torch.Tensor, ...]:
    """Packs the rollouts of one prompt into one sequence: the prompt, then each completion.

        token       p p p p a a a b b        a and b are completions of the prompt p
        position    0 1 2 3 4 5 6 4 5        both go on where the prompt ends
        predictor           3 4 5 3 7        index of the token whose output predicts this one

    The attention mask lets a token see the prompt and its own completion up to itself, just as in a
    sequence of its own. Only the cost changes: the prompt is computed once, not once for each
    completion, and nothing is padded. What is completion is known from lengths, never from ids:
    where pad = eos, a mask by id drops the eos that teaches the model to stop (trl#6357).

    Returns ids (L,), positions (L,), predictor (T,), int64, and attention_mask (L, L), bool:
    [token, what it sees].
    """
    parts = [batch[0].prompt_ids, *(rollout.completion_ids for rollout in batch)]
    lengths = torch.tensor([len(part) for part in parts], device=DEVICE)
    part = torch.arange(len(parts), device=DEVICE).repeat_interleave(lengths)  # 0 is the prompt
    index, prompt = torch.arange(len(part), device=DEVICE), lengths[0]
    start = (lengths.cumsum(0) - lengths)[part]
    positions = torch.where(part > 0, index - start + prompt, index)
    predictor = torch.where(index == start, prompt, index)[prompt:] - 1
    attention_mask = ((part == 0) | (part == part[:, None])).tril()
    return torch.tensor(sum(parts, []), device=DEVICE), positions, predictor, attention_mask


def completion_logprobs(model, ids, positions, predictor, attention_mask, temperature: float):
    """log pi of each completion token, in nats, float32 (T,), of one sequence from `pack`."""
    inputs = dict(position_ids=positions[None], attention_mask=attention_mask[None, None])
    hidden = model.base_model(ids[None], **inputs, use_cache=False).last_hidden_state[0, predictor]

    def logprobs(hidden, targets):
        # The temperature divides the logits, before the softmax (trl#3029).
        logits = model.get_output_embeddings()(hidden).float() / temperature
        return logits.gather(-1, targets[:, None]).squeeze(-1) - logits.logsumexp(-1)

    # With a vocabulary of 150,000, logits are the largest tensors of all. Only one chunk of them
    # exists at a time: the backward pass computes it again.
    chunks = zip(hidden.split(LOGITS_AT_ONCE), ids[-len(predictor) :].split(LOGITS_AT_ONCE))
    return torch.cat([checkpoint(logprobs, *chunk, use_reentrant=False) for chunk in chunks])


# ----- Loss and update


def grpo_loss(logprobs, old_logprobs, advantages, lengths, clip_eps: float):
    """The loss of each of C completions (C,), and of each of their T tokens its ratio to pi_old
    (T,) and whether the clip takes its gradient away (T,), bool.

        loss_i = -mean over its tokens t of min(ratio A_i, clamp(ratio, 1 - eps, 1 + eps) A_i)
        ratio  = pi(t) / pi_old(t)

    The paper's GRPO-PODS objective on the kept subset. logprobs and old_logprobs are (T,) in nats,
    one completion after another; advantages (C,); lengths (C,) int64, their tokens. pi_old is the
    engine's policy, from which the tokens were sampled: so the ratio is also the importance ratio
    that corrects the engine's rounding, and it covers several updates on a batch. Each completion
    counts the same, however long: the paper's choice (DAPO's mean over all tokens gives long ones
    more weight). In numbers, for eps = 0.2:

        A = 2,  ratio 1.25: min(2.5, 2.4) = 2.4, clipped: for A > 0 no gradient above 1 + eps.
        A = -1, ratio 0.5:  min(-0.5, -0.8) = -0.8, clipped: for A < 0 no gradient below 1 - eps.
        A = -1, ratio 1.5:  min(-1.5, -1.2) = -1.5, not clipped: a bad token that became likelier
                            is still pushed back.
    """
    A = advantages.repeat_interleave(lengths)
    ratio = (logprobs - old_logprobs).exp()
    free, clamped = ratio * A, ratio.clamp(1 - clip_eps, 1 + clip_eps) * A
    losses = [-tokens.mean() for tokens in torch.min(free, clamped).split(lengths.tolist())]
    return torch.stack(losses), ratio.detach(), clamped < free


def update(model, optimizer, rollouts: list[Rollout], count: int, cfg: Config) -> dict[str, float]:
    """One optimizer step on the mean loss of `count` = prompts * m completions. Returns metrics.

    So each token's term is divided by (tokens of its completion) * prompts * m, also where rollouts
    without a gradient are left out: dividing by the rest would inflate it (trl#7068). Of 2 prompts
    with m = 2, one of them with equal rewards, 2 losses are divided by 4. And so the gradients of
    the micro-batches add up to that of the whole batch. Without rollouts, nothing changes.
    """
    total, tokens, sums = 0.0, 0, torch.zeros(3, dtype=torch.float64)
    for batch in micro_batches(rollouts, cfg.micro_batch_tokens):
        old_logprobs = torch.tensor([x for r in batch for x in r.old_logprobs], device=DEVICE)
        A = torch.tensor([r.advantage for r in batch], device=DEVICE)
        lengths = torch.tensor([len(r.completion_ids) for r in batch], device=DEVICE)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=cfg.dtype == "bfloat16"):
            logprobs = completion_logprobs(model, *pack(batch), cfg.temperature)
        losses, ratio, clipped = grpo_loss(logprobs, old_logprobs, A, lengths, cfg.clip_eps)
        loss = losses.sum() / count
        loss.backward()
        total += loss.item()
        tokens += len(ratio)
        logp_diff = (logprobs.detach() - old_logprobs).abs()
        sums += torch.stack([ratio, clipped, logp_diff]).double().sum(-1).cpu()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm).item()
    if not math.isfinite(total + grad_norm):
        # One NaN in the weights turns every later completion into "!!!!" (verl#721).
        raise FloatingPointError(f"loss {total}, gradient norm {grad_norm}: try a lower --lr")
    optimizer.step()
    optimizer.zero_grad()
    names = ("train/ratio", "train/clip_fraction", "train/logp_diff")
    means = dict(zip(names, (sums / max(tokens, 1)).tolist()))
    return {"train/loss": total, "train/grad_norm": grad_norm, "train/tokens": tokens} | means


# ----- The new weights into the engine


def load_weights_into_vllm(llm: LLM, model: torch.nn.Module, dtype: str) -> None:
    """Gives the engine the trained weights. A mistake here would raise no error:

    - state_dict(), since named_parameters() omits a tied lm_head, and the engine would keep its old
      one. (An engine that has none of its own, as for Gemma 2, must get none.)
    - An iterator: without one, reload_weights loads the starting model from disk (trl#5312).
    - Cast here: otherwise vLLM warns about each tensor.
    """
    (has_head,) = llm.apply_model(lambda engine_model: hasattr(engine_model, "lm_head"))
    state, to = model.state_dict(), getattr(torch, dtype)
    weights = ((k, w.to(to)) for k, w in state.items() if has_head or k != "lm_head.weight")
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})


# ----- One step


def take_step(llm: LLM, model, optimizer, problems: list[dict], cfg: Config):
    """One training step on the problems. Returns all their rollouts, and the step's metrics."""
    started = time.perf_counter()
    groups = generate(llm, problems, cfg.n, cfg.temperature, cfg.max_new_tokens)
    generated = time.perf_counter()
    rewards, kept = down_sample(groups, cfg)

    # The update. A group whose kept rewards are all equal has advantages of 0 and no gradient: it
    # costs no work, but counts in the denominator. (Normalised over all n, it may have one.)
    varied = [group for group in groups if any(rollout.advantage for rollout in group)]
    train_rollouts = [rollout for group in varied for rollout in group if rollout.kept]
    count, updates = len(problems) * cfg.m, []
    llm.sleep(level=2)  # on a GPU, vLLM gives back the memory of its weights and its cache
    for _ in range(cfg.updates_per_batch):
        updates.append(update(model, optimizer, train_rollouts, count, cfg))

    # The new weights into vLLM. Weights first, then the cache: the other way they would not fit
    # (vllm#15254). An engine that wakes from level 2 without new weights talks gibberish
    # (vllm#29341). Gradients are gone by now, and vLLM empties torch's own cache.
    llm.wake_up(tags=["weights"])
    load_weights_into_vllm(llm, model, cfg.dtype)
    if not llm.wake_up(tags=["kv_cache"]):  # otherwise generate would hang
        raise RuntimeError("vLLM did not wake up")
    metrics = {"time/generate": generated - started, "time/update": time.perf_counter() - generated}
    metrics |= rollout_metrics(groups, rewards, rewards.gather(-1, kept))
    metrics["rollout/zero_std_groups"] = len(groups) - len(varied)
    metrics |= {key: fmean(each[key] for each in updates) for key in updates[0]}
    # Of the first update only: engine and trainer still hold the same weights there.
    metrics["train/logp_diff"] = updates[0]["train/logp_diff"]
    return groups, metrics


def rollout_metrics(groups: list[list[Rollout]], rewards, kept_rewards) -> dict[str, float]:
    """From the rewards (prompts, n) and (prompts, m); each std is that of a group, averaged."""
    rollouts = [rollout for group in groups for rollout in group]
    return {
        "rollout/tokens": sum(len(r.completion_ids) for r in rollouts),
        "rollout/reward_mean": rewards.mean().item(),
        "rollout/reward_std": rewards.std(-1, correction=0).mean().item(),
        "rollout/kept_reward_mean": kept_rewards.mean().item(),
        "rollout/kept_reward_std": kept_rewards.std(-1, correction=0).mean().item(),
        "rollout/accuracy": fmean(r.correct for r in rollouts),
        "rollout/format": fmean(r.well_formed for r in rollouts),
        "rollout/truncated": fmean(r.truncated for r in rollouts),
        # An estimate: the mean of -log pi_old over tokens that pi_old sampled.
        "rollout/entropy": -fmean(x for r in rollouts for x in r.old_logprobs),
    }


def evaluate(llm: LLM, problems: list[dict], cfg: Config) -> dict[str, float]:
    """Shares of greedy completions: with the right answer, well-formed, and both."""
    answers = [group[0] for group in generate(llm, problems, 1, 0.0, cfg.max_new_tokens)]
    return {
        "eval/accuracy": fmean(r.correct for r in answers),
        "eval/format": fmean(r.well_formed for r in answers),
        "eval/accuracy_with_format": fmean(r.correct and r.well_formed for r in answers),
    }


# ----- The folder of a run

LOGS = ("metrics.jsonl", "rollouts.jsonl")
MAY_CHANGE = ("output_dir", "max_steps", "save_every")  # settings that may differ on resume


def open_run(cfg: Config):
    """The run's folder, made if need be, and its lock, to be kept until the process ends.

    Raises Refusal if a live process has the run, or if it was made with other settings.
    """
    run = Path(cfg.output_dir)
    run.mkdir(parents=True, exist_ok=True)
    lock = open(run / "lock", "w")
    with as_refusal(
        f"{run} is in use by a live process; take another --output_dir", BlockingIOError
    ):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, however it ends
    settings, file = asdict(cfg), run / "config.json"
    if (run / "checkpoint.pt").exists() or (run / LOGS[0]).exists():
        old = json.loads(file.read_text())
        asked = {key: (old.get(key), now) for key, now in settings.items() if key not in MAY_CHANGE}
        if differ := [f"{key}: {a} there, {b} now" for key, (a, b) in asked.items() if a != b]:
            raise Refusal(f"{run} has other settings ({', '.join(differ)}); take another folder")
    else:
        file.write_text(json.dumps(settings, indent=1))
    return run, lock


def log(file: Path, rows: list[dict]) -> None:
    with open(file, "a", encoding="utf-8") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)


def log_rollouts(run: Path, step: int, problems: list[dict], groups: list[list[Rollout]]) -> None:
    """All rollouts, one line each, in the order in which the rule saw them."""
    shown = ("reward", "correct", "kept", "advantage", "truncated", "text")
    for number, (problem, group) in enumerate(zip(problems, groups), start=1):
        same = dict(step=step, prompt=number, question=problem["question"], gold=problem["gold"])
        rows = [same | {key: getattr(rollout, key) for key in shown} for rollout in group]
        log(run / LOGS[1], rows)


def save(run: Path, model, optimizer, metrics: dict) -> None:
    """A checkpoint: weights, AdamW's state, the step's metrics, and how long the logs are by now.

    Written beside the old one, then renamed: a kill or a full disk leaves one of them, whole.
    """
    state = dict(model=model.state_dict(), optimizer=optimizer.state_dict(), metrics=metrics)
    state["logs"] = {name: (run / name).stat().st_size for name in LOGS if (run / name).exists()}
    new = run / "checkpoint.pt.new"
    try:
        with open(new, "wb") as file:
            torch.save(state, file)
        os.replace(new, run / "checkpoint.pt")
    except RuntimeError as error:  # what torch makes of a full disk
        raise error.__context__ or error
    finally:
        new.unlink(missing_ok=True)


def restore(run: Path, model, optimizer) -> dict | None:
    """Goes back to the checkpoint and returns its metrics; None where there is none.

    Weights and AdamW's state are all that a run needs, since problems and random numbers depend on
    seed and step alone. Log lines of later steps are cut off: these steps are run again. On a CPU
    they come out the same to the bit; on a GPU, sums may change their order.
    """
    state = dict(metrics=None, logs={})
    if (run / "checkpoint.pt").exists():
        # Mapped, so that 12 bytes per parameter need not fit into memory. Not on a CPU, where AdamW
        # would keep the file mapped when the next one has replaced it.
        mapped = DEVICE.type == "cuda"
        state = torch.load(run / "checkpoint.pt", "cpu", weights_only=True, mmap=mapped)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for file in filter(Path.exists, (run / name for name in LOGS)):
        os.truncate(file, min(file.stat().st_size, state["logs"].get(file.name, 0)))
    return state["metrics"]


# ----- The run

STOP: list[int] = []  # stop signals received


def stop_after_step(number: int, frame) -> None:
    """Ctrl-C or SIGTERM: the step ends and is saved. Ctrl-C again ends the process at once."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    STOP.append(number)
    # Not print: the signal may have come while a print holds stderr.
    os.write(2, b"Stopping after this step; Ctrl-C again stops at once.\n")


def build_model_and_optimizer(cfg: Config):
    """The policy that is trained, in float32, and its AdamW."""
    # float32: at a learning rate of 1e-6, 98 of 100 bf16 weights would round back to what they
    # were. sdpa: other attention kernels might add the boolean mask to the scores.
    options = dict(dtype=torch.float32, attn_implementation="sdpa")
    model = AutoModelForCausalLM.from_pretrained(cfg.model, **options).to(DEVICE).train()
    if cfg.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    options = dict(lr=cfg.lr, betas=(0.9, 0.99), weight_decay=cfg.weight_decay, fused=True)
    return model, torch.optim.AdamW(model.parameters(), **options)


def train(cfg: Config) -> int:
    """The whole run, or the rest of it. Returns the exit code."""
    signal.signal(signal.SIGINT, stop_after_step)
    signal.signal(signal.SIGTERM, stop_after_step)
    run, _lock = open_run(cfg)
    with as_refusal(f"--model: cannot use {cfg.model}", OSError, ValueError):
        tokenizer = AutoTokenizer.from_pretrained(cfg.model)
        problems = load_problems(cfg, tokenizer, "train")
        test_problems = load_problems(cfg, tokenizer, "test")
    print("Starting vLLM and loading the model: seconds on a CPU, a minute or two on a GPU.")
    llm = start_engine(cfg, problems + test_problems)
    model, optimizer = build_model_and_optimizer(cfg)
    saved = restore(run, model, optimizer)
    metrics = saved or {"step": 0}
    load_weights_into_vllm(llm, model, cfg.dtype)
    bar = tqdm(total=cfg.max_steps, initial=metrics["step"], desc=run.name, unit="step")

    while True:
        # After each step, and before the first (step 0): evaluate, log, save.
        step = metrics["step"]
        done = step >= cfg.max_steps
        if "eval/accuracy" not in metrics and (done or step % cfg.eval_every == 0):
            metrics |= evaluate(llm, test_problems, cfg)
            bar.write(REPORT.format(**metrics))
        if metrics is not saved:  # which is in the log, and on disk
            log(run / LOGS[0], [metrics])
            if done or STOP or (step > 0 and step % cfg.save_every == 0):
                save(run, model, optimizer, metrics)
        if done or STOP:
            break

        # The next step. vLLM draws from torch's generator on a CPU and from numpy's on a GPU.
        step += 1
        set_seed((cfg.seed * 1_000_003 + step) % 2**32)
        chosen = problems_of_step(problems, cfg, step)
        groups, measured = take_step(llm, model, optimizer, chosen, cfg)
        metrics = {"step": step} | measured
        log_rollouts(run, step, chosen, groups)
        if metrics["rollout/truncated"] > 0.5:
            bar.write("Warning: over half of the rollouts are cut off; raise --max_new_tokens")
        if metrics["train/logp_diff"] > 0.3:
            bar.write("Warning: train/logp_diff is above 0.3: vLLM may not have the new weights")
        bar.set_postfix(reward=metrics["rollout/reward_mean"], cut_off=metrics["rollout/truncated"])
        bar.update()

    bar.close()
    if not done:
        print(f"Stopped after step {step}. The same command goes on from there.")
        return 128 + STOP[-1]
    model.to(torch.bfloat16).save_pretrained(run / "model")
    tokenizer.save_pretrained(run / "model")
    print(f"Done: the model is in {run / 'model'}.")
    return 0


def main() -> int:
    """Trains as the command line says. Known failures print one line on stderr: exit code 2 for a
    setting or an input that cannot work, 1 for anything else. Of a full disk, for one, it says
    "pods.py: [Errno 28] No space left on device. The last checkpoint, if there is one, is whole".
    """
    logging.disable_progress_bar()
    try:
        return train(parse_settings())
    except Refusal as error:
        code, message = 2, error
    except (MemoryError, RuntimeError) as error:
        # torch's on a CPU and vLLM's when it wakes up are plain RuntimeErrors.
        if not re.search("MemoryError|(out of|allocate) memory", repr(error)):
            raise
        code, message = 1, "out of memory; lower --micro_batch_tokens or --gpu_memory_utilization"
    except (FloatingPointError, OSError, SafetensorError) as error:
        code, message = 1, f"{error}. The last checkpoint, if there is one, is whole"
    print(f"pods.py: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
