"""GRPO with down-sampled rollouts (PODS, arXiv 2504.13818): generate n a prompt, learn from m of them.

    bash run_gsm8k.sh sets everything up and runs this file; python pods.py --help explains every setting.

Read from top to bottom; the order is that of the data in one training step:

    problems -> n rollouts each (vLLM, in this process) -> rewards -> m of n kept (sampling.py) -> advantages
             -> clipped loss on the kept -> AdamW on all weights -> the new weights into vLLM -> the next step
"""

import os

# Set before vllm is imported. Its engine would otherwise run in a child process, where the live weights are
# out of reach (vllm#16434) and which a kill of this one may leave behind with its memory (vllm#55510).
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import random
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch
from datasets import load_dataset
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoModelForCausalLM, set_seed
from vllm import LLM, SamplingParams

from extras import checks, runs
from extras.easy import easy_problems
from extras.memory import Memory, keep_freed_memory
from rewards import build_messages, gold_answer, is_correct, is_well_formed, reward
from sampling import RULES

HERE = Path(__file__).resolve().parent
LOGITS_AT_ONCE = 512  # tokens
REACHED = "test accuracy {eval_accuracy:.1%}, format {eval_format:.1%}"


def setting(default, help: str):
    return field(default=default, metadata={"help": help})


@dataclass
class Config:
    # What to learn
    model: str = setting("Qwen/Qwen2.5-0.5B-Instruct", "a chat model: its Hugging Face name, or its folder")
    data: str = setting("gsm8k", "gsm8k (hub), easy (made here), or a folder with {train,test}.jsonl")
    name: str = setting("gsm8k", "name of the run: its files go to runs/NAME, beside pods.py")
    seed: int = setting(0, "decides the order of the problems and the sampling")
    # Down-sampling
    n: int = setting(64, "rollouts generated for each prompt")
    m: int = setting(16, "rollouts kept of the n; m = n is plain GRPO")
    rule: Literal[tuple(RULES)] = setting("max_variance", "which m are kept")
    advantage_over: Literal["kept", "all"] = setting("kept", "whose mean and std normalise the advantages")
    # Rollouts
    prompts_per_step: int = setting(4, "problems in each step")
    temperature: float = setting(1.0, "of the sampling, and of the policy that is trained")
    max_prompt_tokens: int = setting(512, "longest prompt, in tokens")
    max_new_tokens: int = setting(512, "longest completion, in tokens: a longer one is cut off")
    example: bool = setting(False, "show a solved problem in the prompt: very small models need one")
    # Update
    lr: float = setting(1e-6, "learning rate of AdamW, constant")
    weight_decay: float = setting(0.0, "of AdamW")
    clip: float = setting(0.2, "epsilon: beyond 1 +- epsilon, a ratio pi / pi_old earns no more")
    kl: float = setting(0.0, "weight of the KL penalty to the starting model, loaded only if this is above 0")
    updates_per_batch: int = setting(1, "optimizer steps on each batch of rollouts")
    max_grad_norm: float = setting(1.0, "a longer gradient is scaled down to this norm")
    micro_batch_tokens: int = setting(2048, "tokens in one forward pass: decides peak memory")
    gradient_checkpointing: bool = setting(False, "recompute activations: less memory, a third more time")
    dtype: Literal["bfloat16", "float32"] = setting("bfloat16", "of engine and autocast; weights are float32")
    gpu_memory_utilization: float = setting(0.35, "vLLM's share of the GPU; it returns it for each update")
    # Length of the run
    max_steps: int = setting(500, "steps in the run")
    max_minutes: float = setting(0.0, "stop after so much training, evaluation not counted; 0: no limit")
    eval_every: int = setting(50, "steps between evaluations; one more comes before the first and at the end")
    eval_problems: int = setting(0, "how many test problems to evaluate on, from the first; 0: all")
    save_every: int = setting(10, "steps between checkpoints: the same command goes on from the last one")
    fresh: bool = setting(False, "start over; a run of the same name is moved aside")
    eager: bool = setting(False, "do not compile vLLM: it starts a minute sooner, and generates more slowly")
    trust_remote_code: bool = setting(False, "run Python code that comes with the model")


@dataclass
class Rollout:
    prompt_ids: list[int]
    completion_ids: list[int]  # as sampled, never tokenised again; the last is eos unless it was cut off
    logprobs: list[float]  # log pi_old of each completion token, from vLLM: the policy that really sampled
    text: str
    truncated: bool
    reward: float = 0.0
    kept: bool = False
    advantage: float = 0.0


def load_problems(data: str, split: str) -> list[dict]:
    """The "train" or "test" problems, each {"question": ..., "answer": "reasoning #### number"}."""
    if data == "easy":
        return easy_problems(split)
    if data == "gsm8k":
        return list(checks.fetch("--data", load_dataset, "openai/gsm8k", "main", split=split))
    return checks.read_problems(Path(data) / f"{split}.jsonl")


def encode(problems: list[dict], tokenizer, cfg: Config) -> tuple[list[list[int]], list[dict]]:
    """The prompts as token ids, and their problems. Leaves out prompts that are too long."""
    messages = [build_messages(problem["question"], cfg.example) for problem in problems]
    prompts = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    fits = [i for i, ids in enumerate(prompts) if len(ids) <= cfg.max_prompt_tokens]
    checks.check_lengths([len(ids) for ids in prompts], cfg.max_prompt_tokens)
    return [prompts[i] for i in fits], [problems[i] for i in fits]


def problems_of_step(count: int, per_step: int, seed: int, step: int) -> list[int]:
    """Indices of the problems of step 1, 2, ...: passes over all `count`, in orders that hang on the seed."""
    passes = [divmod(i, count) for i in range((step - 1) * per_step, step * per_step)]
    return [random.Random(f"{seed}/{p}").sample(range(count), count)[place] for p, place in passes]


def start_engine(cfg: Config, on_gpu: bool) -> LLM:
    """vLLM in this process. Starting it reseeds the global generators, so seed after it."""
    if on_gpu:
        placement = dict(gpu_memory_utilization=cfg.gpu_memory_utilization, enable_sleep_mode=True)
    else:  # the prefix cache shares whole blocks of a prompt among its rollouts: 128 tokens are too coarse
        placement = dict(kv_cache_memory_bytes=2**30, block_size=32)
        if cfg.eager:  # vLLM compiles a part of its sampling all the same, if it is not told otherwise
            torch.compiler.set_stance("force_eager")
    return LLM(
        cfg.model,
        trust_remote_code=cfg.trust_remote_code,
        dtype=cfg.dtype,
        enforce_eager=cfg.eager,
        max_model_len=cfg.max_prompt_tokens + cfg.max_new_tokens,
        logprobs_mode="processed_logprobs",  # of what is sampled from: after the temperature (trl#4159)
        **placement,
    )


def generate(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[Rollout]]:
    """params.n rollouts for each prompt, in the prompts' order. Token ids go in and come out.

    Ids, because vLLM would put a second BOS before a templated string (vllm#16976). Random numbers come from
    a global generator, which the caller seeds: a seed for each request is slow, and fails on a CPU.
    """
    # The prefix cache survives a change of weights (vllm#9744): start each call from an empty one.
    if not llm.reset_prefix_cache():
        raise RuntimeError("vLLM kept its prefix cache, and with it keys and values of older weights")

    def rollout(prompt_ids: list[int], out) -> Rollout:
        logprobs = [at[token].logprob for token, at in zip(out.token_ids, out.logprobs or [])]
        return Rollout(prompt_ids, list(out.token_ids), logprobs, out.text, out.finish_reason == "length")

    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [[rollout(output.prompt_token_ids, out) for out in output.outputs] for output in outputs]


def advantages(rewards: torch.Tensor, kept: torch.Tensor, over: str = "kept") -> torch.Tensor:
    """Advantages (prompts, m), float64, of rewards (prompts, n) at the kept indices (prompts, m).

        A_i = (r_i - mean) / (std + 1e-4)    for i in S, the kept subset

    with mean and std over S (over="kept", the paper's choice) or over all n (over="all"); std is that of the
    population. Equal rewards give exactly 0, not the rounding error of their mean, which 1e-4 would enlarge.

    In numbers: of the rewards 0.4 1.0 0.0 0.6, max-variance keeps 1.0 and 0.0. Over the kept, mean and std
    are 0.5, so A is 0.5 / 0.5001 = 0.9998 and -0.9998. Over all four, std is 0.3606, and A 1.386 and -1.386.
    """
    rewards = rewards.double()
    kept_rewards = rewards.gather(-1, kept)
    base = kept_rewards if over == "kept" else rewards
    std = base.std(-1, correction=0, keepdim=True)
    varied = base.amax(-1, keepdim=True) > base.amin(-1, keepdim=True)
    return torch.where(varied, (kept_rewards - base.mean(-1, keepdim=True)) / (std + 1e-4), 0.0)


def down_sample(groups: list[list[Rollout]], cfg: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Marks m of the n rollouts of each group as kept, and gives them their advantages.

    Returns all rewards (prompts, n), float64, and the indices of the kept (prompts, m).
    """
    rewards = torch.tensor([[rollout.reward for rollout in group] for group in groups], dtype=torch.float64)
    if not rewards.isfinite().all():
        raise FloatingPointError("a reward is not finite; no weight was changed")
    kept = RULES[cfg.rule](rewards, cfg.m)
    A = advantages(rewards, kept, cfg.advantage_over)
    for group, indices, values in zip(groups, kept.tolist(), A.tolist()):
        for i, value in zip(indices, values):
            group[i].kept, group[i].advantage = True, value
    return rewards, kept


def cut_into_rows(rollouts: list[Rollout], max_tokens: int) -> list[list[Rollout]]:
    """Rollouts, those of one prompt one after another, in rows for `pack`: each of max_tokens at most."""
    rows, tokens = [], 0
    for rollout in rollouts:
        tokens += len(rollout.completion_ids)
        if not rows or rows[-1][0].prompt_ids != rollout.prompt_ids or tokens > max_tokens:
            rows.append([])
            tokens = len(rollout.prompt_ids) + len(rollout.completion_ids)
        rows[-1].append(rollout)
    return rows


def pack(row: list[Rollout], device: torch.device) -> tuple[torch.Tensor, ...]:
    """One sequence out of rollouts of one prompt: the prompt once, then each completion.

        token       p p p p a a a b b        a and b are completions of the prompt p
        position    0 1 2 3 4 5 6 4 5        both go on where the prompt ends
        predictor           3 4 5 3 7        index of the token whose output predicts a completion token

    A token sees what comes before it, but never another completion: what it would see in a sequence of its
    own. Only the cost changes: the prompt is computed once, not once a completion, and nothing is padded.
    What is a completion token follows from lengths, never from ids: where pad = eos, a mask by id would drop
    the eos that teaches the model to stop (trl#6357).

    Returns ids (L,), positions (L,), predictor (T,), all int64, and sees (L, L) bool, [token, what it sees].
    """
    parts = [row[0].prompt_ids, *(rollout.completion_ids for rollout in row)]
    lengths = torch.tensor([len(part) for part in parts], device=device)
    part = torch.arange(len(parts), device=device).repeat_interleave(lengths)  # 0 is the prompt
    index, prompt = torch.arange(len(part), device=device), lengths[0]
    start = (lengths.cumsum(0) - lengths)[part]
    positions = torch.where(part > 0, index - start + prompt, index)
    predictor = torch.where(index == start, prompt, index)[prompt:] - 1
    sees = ((part == 0) | (part == part[:, None])).tril()
    return torch.tensor(sum(parts, []), device=device), positions, predictor, sees


def completion_logprobs(model, ids, positions, predictor, sees, temperature: float) -> torch.Tensor:
    """log pi of each completion token, in nats, float32 (T,), of one sequence from `pack`."""
    inputs = dict(position_ids=positions[None], attention_mask=sees[None, None], use_cache=False)
    hidden = model.base_model(ids[None], **inputs).last_hidden_state[0, predictor]

    def logprobs(hidden, targets):
        logits = model.get_output_embeddings()(hidden).float() / temperature  # before the softmax (trl#3029)
        return logits.gather(-1, targets[:, None]).squeeze(-1) - logits.logsumexp(-1)

    # Over 150,000 tokens, logits are the largest tensors of all: one chunk of them is there at a time, and
    # the backward pass computes it again.
    chunks = zip(hidden.split(LOGITS_AT_ONCE), ids[-len(predictor) :].split(LOGITS_AT_ONCE))
    return torch.cat([checkpoint(logprobs, *chunk, use_reentrant=False) for chunk in chunks])


def grpo_loss(logprobs, old_logprobs, advantages, lengths, clip: float, ref_logprobs=None, kl: float = 0.0):
    """The loss of each of C completions, (C,), and the ratio of each of their T tokens, (T,).

        loss_i = -mean over tokens t of [ min(ratio A_i, clamp(ratio, 1 - clip, 1 + clip) A_i) - kl k3 ]
        ratio  = pi(t) / pi_old(t)        k3 = pi_ref(t) / pi(t) - log(pi_ref(t) / pi(t)) - 1

    The paper's GRPO-PODS objective on the kept subset; k3 is Schulman's estimate of KL(pi, pi_ref), see
    joschu.net/blog/kl-approx.html. logprobs, old_logprobs and ref_logprobs are (T,) in nats, one completion
    after another; advantages (C,), lengths (C,) int64, their tokens. pi_old is what vLLM sampled from: this
    covers its rounding, and several updates on one batch, alike. Each completion counts the same, however
    long: the paper's choice (DAPO's mean over tokens gives long ones more weight). In numbers, clip = 0.2:

        A = 2,  ratio 1.25: min(2.5, 2.4) = 2.4, clamped: for A > 0 the gradient is 0 above 1 + clip.
        A = -1, ratio 0.5:  min(-0.5, -0.8) = -0.8, clamped: for A < 0 it is 0 below 1 - clip.
        A = -1, ratio 1.5:  min(-1.5, -1.2) = -1.5, not clamped: a bad token that became likelier goes back.
        pi_ref / pi = 2:    k3 = 2 - log 2 - 1 = 0.307. Never below 0, since log x <= x - 1.
    """
    A = advantages.repeat_interleave(lengths)
    ratio = (logprobs - old_logprobs).exp()
    objective = torch.min(ratio * A, ratio.clamp(1 - clip, 1 + clip) * A)
    if ref_logprobs is not None:
        log_ref_ratio = ref_logprobs - logprobs
        objective = objective - kl * (log_ref_ratio.exp() - log_ref_ratio - 1)
    return -torch.stack([tokens.mean() for tokens in objective.split(lengths.tolist())]), ratio.detach()


def update(model, ref_model, optimizer, rollouts: list[Rollout], count: int, cfg: Config) -> dict[str, float]:
    """One optimizer step on the mean loss of `count` = prompts * m completions. Returns its metrics.

    So a token's term is divided by (tokens of its completion) * prompts * m, also where rollouts without a
    gradient are left out: divided by what is left, the others would grow (trl#7068). Of 2 prompts with m = 2,
    one idle, 2 losses are divided by 4. And so the gradients of all rows add up to that of the whole batch.
    """
    device, total, gaps, ratios = next(model.parameters()).device, 0.0, [], []
    for row in cut_into_rows(rollouts, cfg.micro_batch_tokens):
        packed = pack(row, device)
        old_logprobs = torch.tensor([x for rollout in row for x in rollout.logprobs], device=device)
        A = torch.tensor([rollout.advantage for rollout in row], device=device)
        lengths = torch.tensor([len(rollout.completion_ids) for rollout in row], device=device)
        ref_logprobs = None
        with torch.autocast(device.type, torch.bfloat16, enabled=cfg.dtype == "bfloat16"):
            if ref_model is not None:
                with torch.no_grad():
                    ref_logprobs = completion_logprobs(ref_model, *packed, cfg.temperature)
            logprobs = completion_logprobs(model, *packed, cfg.temperature)
        losses, ratio = grpo_loss(logprobs, old_logprobs, A, lengths, cfg.clip, ref_logprobs, cfg.kl)
        loss = losses.sum() / count
        loss.backward()
        total += loss.item()
        gaps.append((logprobs.detach() - old_logprobs).abs())
        ratios.append(ratio)
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm).item()
    if not torch.tensor(total + grad_norm).isfinite():
        # One NaN in the weights turns every later completion into "!!!!" (verl#721): stop before that.
        raise FloatingPointError(f"loss {total}, gradient norm {grad_norm}: stopped before the step")
    optimizer.step()
    optimizer.zero_grad()
    mean = lambda parts: torch.cat(parts).double().mean().item() if parts else 0.0
    clipped = [(ratio - 1).abs() > cfg.clip for ratio in ratios]
    of_tokens = dict(ratio=mean(ratios), clip_fraction=mean(clipped), logprob_gap=mean(gaps))
    return dict(loss=total, grad_norm=grad_norm, tokens_updated=sum(map(len, ratios))) | of_tokens


def sync(llm: LLM, model: torch.nn.Module, dtype: str) -> None:
    """Put the trained weights into the engine. Each word of it matters, and no mistake would raise an error:

    - state_dict(), not named_parameters(): those have no tied lm_head, and the engine would keep its old one.
    - An iterator: without one, reload_weights loads the starting model from disk again (trl#5312).
    """
    cast = lambda weight: weight.detach().to(getattr(torch, dtype))  # else vLLM warns once a tensor
    weights = ((name, cast(weight)) for name, weight in model.state_dict().items())
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})


def take_step(llm, model, ref_model, optimizer, prompts, golds, cfg: Config, note=lambda phase: None):
    """One step on `prompts`, token ids, and their answers `golds`. Returns all rollouts, and its metrics."""
    # What is not set here is off, whatever the model's generation_config says: with a top-k, rollouts would
    # be of another policy than the one that is trained. logprobs=0: of the sampled token alone.
    started = time.perf_counter()
    params = SamplingParams(n=cfg.n, temperature=cfg.temperature, max_tokens=cfg.max_new_tokens, logprobs=0)
    groups = generate(llm, prompts, params)
    generated = time.perf_counter()
    note("generating")

    # A reward for each, a finite number, and m of each n.
    for group, gold in zip(groups, golds):
        for rollout in group:
            rollout.reward = reward(rollout.text, gold)
    rewards, kept = down_sample(groups, cfg)

    # The update. A group whose advantages are all 0 has no gradient, but for the KL penalty's: no work.
    idle = [not any(rollout.advantage for rollout in group) for group in groups]
    learn = [r for group, skip in zip(groups, idle) for r in group if r.kept and (cfg.kl > 0 or not skip)]
    llm.sleep(level=2)  # on a GPU, vLLM gives back the memory of its weights and its cache
    count = len(prompts) * cfg.m
    updates = [update(model, ref_model, optimizer, learn, count, cfg) for _ in range(cfg.updates_per_batch)]

    # The new weights into vLLM. In another order the memory of both would not fit (vllm#15254), and an
    # engine woken from level 2 without a sync talks gibberish (vllm#29341).
    note("updating")
    torch.cuda.empty_cache()
    llm.wake_up(tags=["weights"])
    sync(llm, model, cfg.dtype)
    llm.wake_up(tags=["kv_cache"])
    return groups, {
        "generate_seconds": generated - started,
        "update_seconds": time.perf_counter() - generated,
        **runs.measure(groups, rewards, kept),
        "groups_skipped": sum(idle),
        **updates[-1],
        # Mean |difference| of vLLM and trainer before the weights change: 0.04 at most in bf16 in our runs.
        "logprob_gap": updates[0]["logprob_gap"],
    }


def evaluate(llm: LLM, prompts: list[list[int]], problems: list[dict], cfg: Config) -> dict[str, float]:
    """Accuracy and format rate of greedy completions."""
    greedy = SamplingParams(temperature=0.0, max_tokens=cfg.max_new_tokens)
    texts = [group[0].text for group in generate(llm, prompts, greedy)]
    right = fmean(is_correct(text, gold_answer(p["answer"])) for text, p in zip(texts, problems))
    return {"eval_accuracy": right, "eval_format": fmean(map(is_well_formed, texts))}


def train(cfg: Config) -> int:
    """The whole run, or the rest of it: it goes on from its last checkpoint. Returns the exit code."""
    checks.check_settings(cfg)
    run = HERE / "runs" / cfg.name
    lock = runs.open_run(run, asdict(cfg), cfg.fresh)  # held as long as this process lives
    device = "cuda" if (on_gpu := torch.cuda.is_available()) else "cpu"
    tokenizer = checks.load_tokenizer(cfg)
    memory = Memory(cfg, on_gpu, LOGITS_AT_ONCE)  # says what the run will need
    keep_freed_memory()
    prompts, problems = encode(load_problems(cfg.data, "train"), tokenizer, cfg)
    test_set = encode(load_problems(cfg.data, "test")[: cfg.eval_problems or None], tokenizer, cfg)
    llm = checks.started(start_engine, cfg, on_gpu)
    # Only this attention takes `sees` as it is: another might add True and False to its scores.
    options = dict(attn_implementation="sdpa", trust_remote_code=cfg.trust_remote_code)
    load = lambda dtype: AutoModelForCausalLM.from_pretrained(cfg.model, dtype=dtype, **options).to(device)
    # float32 weights: at a learning rate of 1e-6, 98 of 100 bf16 weights would round back to what they were.
    model = load("float32").train()
    ref_model = load(cfg.dtype).eval() if cfg.kl > 0 else None
    if cfg.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = AdamW(model.parameters(), cfg.lr, (0.9, 0.99), weight_decay=cfg.weight_decay, fused=True)

    # Go on from the checkpoint, if there is one: on a CPU exactly, to the bit, since problems and random
    # numbers depend on seed and step alone. (On a GPU, sums may change their order, and then a close call.)
    state_file, metrics = run / "checkpoint" / "state.pt", {"step": 0, "train_seconds": 0.0}
    if resumed := state_file.exists():
        state = torch.load(state_file, map_location="cpu", weights_only=True, mmap=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        metrics, state = state["metrics"], None  # and lets go of the file, which the next save replaces
    runs.forget_after(run, metrics["step"] if resumed else -1)
    sync(llm, model, cfg.dtype)
    bar = tqdm(total=cfg.max_steps, initial=metrics["step"], desc=cfg.name, unit="step")
    stop, watch = runs.Stop(), checks.Watch(cfg, bar)
    done = lambda: metrics["step"] >= cfg.max_steps or 0 < 60 * cfg.max_minutes <= metrics["train_seconds"]

    def follow_up() -> None:
        """What comes after a step: an evaluation (not training time), its line of metrics, a checkpoint."""
        step = metrics["step"]
        if done() or step % cfg.eval_every == 0:
            metrics.update(evaluate(llm, *test_set, cfg))
            bar.write(f"step {step}: " + REACHED.format(**metrics))
        runs.append(run / "metrics.jsonl", metrics)
        if done() or stop.number or (step > 0 and step % cfg.save_every == 0):
            state = dict(model=model.state_dict(), optimizer=optimizer.state_dict(), metrics=metrics)
            runs.write_whole(state_file, lambda file: torch.save(state, file))

    if not resumed:
        follow_up()  # step 0: the model as it comes
    while not (done() or stop.number):
        step = metrics["step"] + 1
        set_seed((cfg.seed * 1_000_003 + step) % 2**32)  # torch's generator for vLLM on CPU, numpy's on GPU
        chosen = problems_of_step(len(prompts), cfg.prompts_per_step, cfg.seed, step)
        asked, golds = [prompts[i] for i in chosen], [gold_answer(problems[i]["answer"]) for i in chosen]
        groups, measured = take_step(llm, model, ref_model, optimizer, asked, golds, cfg, memory.note)
        seconds = metrics["train_seconds"] + measured["generate_seconds"] + measured["update_seconds"]
        metrics = {"step": step, "train_seconds": seconds} | measured
        runs.log_rollouts(run, step, groups, [problems[i] for i in chosen])
        watch(metrics)
        follow_up()

    bar.close()
    step, minutes = metrics["step"], metrics["train_seconds"] / 60
    if not done():
        print(f"Stopped after step {step}. The same command goes on from there.")
        return 128 + stop.number
    if "eval_accuracy" not in metrics:  # the run was told to end where it had stopped
        metrics |= evaluate(llm, *test_set, cfg)
    model.to(torch.bfloat16).save_pretrained(run / "model")
    tokenizer.save_pretrained(run / "model")
    print(REACHED.format(**metrics), f"after {step} steps, {minutes:.1f} minutes.")
    memory.report()
    runs.say_how_to_ask(run / "model", cfg.example)
    return 0


if __name__ == "__main__":
    sys.exit(checks.explained(lambda: train(checks.parse(Config, __doc__))))
