"""What of a run needs how much memory, from its settings and the model's config alone.

    python extras/memory.py        the table of the README, for GPUs of three sizes

The measure of what is taken is that of the machine: all of the GPU, whoever has it, or all of this process.
"""

import ctypes
import resource
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, Qwen2Config

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from extras.checks import Refusal

GIB = 2**30
# Of CUDA itself, its libraries and vLLM's CUDA graphs, of which neither settings nor config tell.
WORKSPACE = 1.5 * GIB
QWEN = {  # of Qwen2.5: hidden size, intermediate size, layers, attention heads, key and value heads
    "0.5B": (896, 4864, 24, 14, 2),
    "1.5B": (1536, 8960, 28, 12, 2),
    "3B": (2048, 11008, 36, 16, 2),
}


def qwen(size: str) -> Qwen2Config:
    """The config of Qwen2.5-{size}."""
    hidden, intermediate, layers, heads, kv_heads = QWEN[size]
    return Qwen2Config(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    )


def activations(config: PretrainedConfig, tokens: int, size: int, checkpointing: bool) -> int:
    """Bytes that autograd keeps of one row of `tokens`, but for weights and logits. size is 2 under autocast.

    Kept of a token in a layer of Llama or Qwen2: h is the hidden, q the queries', f the intermediate size.
        4 bytes each    input and scaled input of both norms                               4 h
        size each       the inputs of q, k, v, gate and up (autocast casts each by itself)  5 h, or else 2 h
                        q; k and v repeated for each query head; the attention's output     4 q
                        gate, silu(gate), up, their product                                 4 f
                        who sees whom, as numbers that are added to the scores              tokens
    """
    h, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    q = heads * (getattr(config, "head_dim", None) or h // heads)
    f = getattr(config, "intermediate_size", None) or 4 * h
    layer = 4 * 4 * h + size * ((5 if size == 2 else 2) * h + 4 * q + 4 * f + tokens)
    last_norm = 4 * 2 * h
    if checkpointing:  # kept are the layers' inputs alone, and one layer at a time is computed again
        return tokens * (layers * 4 * h + layer + last_norm)
    return tokens * (layers * layer + last_norm)


def predict(cfg, config, on_gpu: bool, present: int, logits_at_once: int) -> dict[str, tuple[float, float]]:
    """The parts: {name: (bytes while generating, bytes while updating)}. `present` is what the GPU has."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=cfg.trust_remote_code)
    weights, size = model.num_parameters(), 2 if cfg.dtype == "bfloat16" else 4
    kept = activations(config, cfg.micro_batch_tokens, size, cfg.gradient_checkpointing)
    logits = min(logits_at_once, cfg.micro_batch_tokens) * config.vocab_size
    cache = cfg.gpu_memory_utilization * present - size * weights if on_gpu else GIB
    asleep = 0 if on_gpu else 1  # on a GPU, vLLM gives its memory back during updates
    return {
        "weights, float32": (4 * weights, 4 * weights),
        "AdamW's two moments": (8 * weights, 8 * weights),
        "reference model": (size * weights, size * weights) if cfg.kl > 0 else (0, 0),
        "gradient": (0, 4 * weights),
        "weights, bfloat16, of autocast": (0, 2 * weights if size == 2 else 0),
        f"activations of {cfg.micro_batch_tokens} tokens": (0, kept),
        # The logits; for the gradient their softmax, the chosen token's part, and the sum of both.
        f"logits of {min(logits_at_once, cfg.micro_batch_tokens)} tokens": (0, 4 * 4 * logits),
        "vLLM's weights": (size * weights, asleep * size * weights),
        "vLLM's KV cache, at most": (max(cache, 0), asleep * cache),
        "CUDA and CUDA graphs, a guess": (WORKSPACE, WORKSPACE) if on_gpu else (0, 0),
    }


def sums(parts: dict[str, tuple[float, float]]) -> tuple[float, float]:
    generating, updating = zip(*parts.values())
    return sum(generating), sum(updating)


def table(parts: dict[str, tuple[float, float]]) -> str:
    lines = [f"{'Memory in GiB, computed':34} {'generating':>10} {'updating':>10}"]
    for name, values in [*parts.items(), ("all", sums(parts))]:
        if any(values):
            lines.append(f"  {name:32} " + " ".join(f"{value / GIB:10.2f}" for value in values))
    return "\n".join(lines)


def keep_freed_memory() -> None:
    """Lets glibc keep what is freed of main memory, for the next step, which needs as much again.

    Else each tensor is mapped and unmapped anew, and the kernel fills it with zeros page by page: a tenth of
    an update's time on a CPU. Tensors above 32 MiB, the most that glibc allows, still are: no holes as large
    as those stay behind. In glibc's malloc.h, M_MMAP_THRESHOLD is -3 and M_TRIM_THRESHOLD is -1.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 2**25)
    libc.mallopt(-1, -1)


class Memory:
    """Prints what a run will need. Raises Refusal if a GPU has less. Later notes what it really takes."""

    def __init__(self, cfg, on_gpu: bool, logits_at_once: int):
        self.peaks = {}
        config = AutoConfig.from_pretrained(cfg.model, trust_remote_code=cfg.trust_remote_code)
        present = torch.cuda.get_device_properties(0).total_memory if on_gpu else 0
        parts = predict(cfg, config, on_gpu, present, logits_at_once)
        print(table(parts))
        needed = max(sums(parts)) - WORKSPACE
        if on_gpu and needed > present:
            raise Refusal(
                f"--model {cfg.model} needs {needed / GIB:.1f} GiB of GPU memory and there are"
                f" {present / GIB:.1f}; take a smaller one, or lower --micro-batch-tokens or"
                " --gpu-memory-utilization"
            )

    def note(self, phase: str) -> None:
        """To call at the end of a phase, before anything is given back."""
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            # torch's allocator keeps what it once had: this is the most that the phase needed.
            self.peaks[phase] = max(total - free, self.peaks.get(phase, 0))

    def report(self) -> None:
        peaks = ", ".join(f"{taken / GIB:.2f} {phase}" for phase, taken in self.peaks.items())
        of_process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
        print(f"Memory in GiB, measured: {peaks or f'{of_process:.2f}'}.")


if __name__ == "__main__":
    from pods import LOGITS_AT_ONCE, Config

    print(
        "| model | GPU | weights, AdamW | + vLLM | generating | + gradient, autocast | + activations, logits",
        end="",
    )
    print(" | updating |\n|---|---|---|---|---|---|---|---|")
    for size, present in (("0.5B", 20), ("1.5B", 40), ("3B", 75)):  # the smallest that run_gsm8k.sh gives it
        cfg = Config(gradient_checkpointing=True)
        parts = predict(cfg, qwen(size), True, present * GIB, LOGITS_AT_ONCE)
        of = lambda when, *words: sum(v[when] for k, v in parts.items() if k.startswith(words)) / GIB
        held, vllm = of(0, "weights, float32", "AdamW"), of(0, "vLLM")
        grown, passing = of(1, "gradient", "weights, bfloat16"), of(1, "activations", "logits")
        generating, updating = (total / GIB for total in sums(parts))
        cells = f"{held:.1f} | {vllm:.1f} | {generating:.1f} | {grown:.1f} | {passing:.1f} | {updating:.1f}"
        print(f"| Qwen2.5-{size} | {present} | {cells} |")
