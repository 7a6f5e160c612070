"""What of a run needs how much GPU memory, from its settings and the model's config alone.

    python -m tools.memory                                         the table of docs/gpu.md
    python -m tools.memory Qwen/Qwen2.5-1.5B-Instruct --gpu_gib 24 --gradient_checkpointing

MODEL comes first; after it, all settings of pods.py (python pods.py --help) have their meaning.
"""

import sys
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, Qwen2Config

GIB = 2**30
# Of CUDA itself, its libraries and vLLM's CUDA graphs, of which neither settings nor config tell.
WORKSPACE = 1.5 * GIB
QWEN = {  # of Qwen2.5: hidden size, intermediate size, layers, query heads, key and value heads,
    "0.5B": (896, 4864, 24, 14, 2, 15),  # and the smallest GPU that run_gsm8k.sh gives it, in GiB
    "1.5B": (1536, 8960, 28, 12, 2, 40),
    "3B": (2048, 11008, 36, 16, 2, 75),
}
SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
CACHE = "vLLM's KV cache, at most"
Parts = dict[str, tuple[float, float]]  # {name: (bytes while generating, bytes while updating)}


def qwen_config(size: str) -> Qwen2Config:
    """The config of Qwen2.5-{size}."""
    shape = dict(zip([*SHAPE, "num_key_value_heads"], QWEN[size]))
    return Qwen2Config(vocab_size=151936, tie_word_embeddings=True, **shape)


def activations(config: PretrainedConfig, tokens: int, size: int, checkpointing: bool) -> int:
    """Bytes that autograd keeps of a sequence of `tokens`, but for weights and logits.

    `size` is that of a number in a matrix product, in bytes: 2 under autocast, else 4. Kept of a
    token in a layer of Llama or Qwen2, where h is the hidden size, q that of all queries, and f
    the intermediate size:

        4 bytes each    input and scaled input of both norms                            4 h
        size each       inputs of q, k, v, gate and up: autocast casts each by itself   5 h, or 2 h
                        q; k and v, repeated for each query head; attention's output    4 q
                        gate, silu(gate), up, their product                             4 f
                        the attention mask, as numbers that are added to the scores     tokens
    """
    h, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    q = heads * (getattr(config, "head_dim", None) or h // heads)
    f = getattr(config, "intermediate_size", None) or 4 * h
    layer = 4 * 4 * h + size * ((5 if size == 2 else 2) * h + 4 * q + 4 * f + tokens)
    last_norm = 4 * 2 * h
    if checkpointing:  # the layers' inputs are kept, and one layer at a time is computed again
        return tokens * (layers * 4 * h + layer + last_norm)
    return tokens * (layers * layer + last_norm)


def predict(cfg, config: PretrainedConfig, gpu_bytes: float, logits_at_once: int) -> Parts:
    """The parts of a run with the pods.Config `cfg`. gpu_bytes is 0 for a run without a GPU."""
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(config).num_parameters()
    size = 2 if cfg.dtype == "bfloat16" else 4
    tokens, chunk = cfg.micro_batch_tokens, min(logits_at_once, cfg.micro_batch_tokens)
    kept = activations(config, tokens, size, cfg.gradient_checkpointing)
    cache = cfg.gpu_memory_utilization * gpu_bytes - size * weights if gpu_bytes else GIB
    cache = max(cache, 0)
    awake = 0 if gpu_bytes else 1  # on a GPU, vLLM gives its memory back during updates
    workspace = WORKSPACE if gpu_bytes else 0
    return {
        "weights, float32": (4 * weights, 4 * weights),
        "AdamW's two moments": (8 * weights, 8 * weights),
        "gradient": (0, 4 * weights),
        "weights, bfloat16, of autocast": (0, 2 * weights if size == 2 else 0),
        f"activations of {tokens} tokens": (0, kept),
        # The logits; for the gradient their softmax, the chosen token's part, the sum of both.
        f"logits of {chunk} tokens": (0, 4 * 4 * chunk * config.vocab_size),
        "vLLM's weights": (size * weights, awake * size * weights),
        CACHE: (cache, awake * cache),
        "CUDA and CUDA graphs, a guess": (workspace, workspace),
    }


def in_all(parts: Parts) -> tuple[float, float]:
    generating, updating = zip(*parts.values())
    return sum(generating), sum(updating)


def table(columns: dict[str, Parts]) -> str:
    """Markdown, in GiB: a row for each part, a column for each run, {its heading: its parts}."""
    columns = {head: parts | {"all": in_all(parts)} for head, parts in columns.items()}
    lines = [["GiB: generating, updating", *columns], ["---", *["---:"] * len(columns)]]
    for name in next(iter(columns.values())):
        pairs = [parts[name] for parts in columns.values()]
        lines.append([name, *(f"{a / GIB:.1f}, {b / GIB:.1f}" for a, b in pairs)])
    return "\n".join(
        "| " + " | ".join([f"{a:30}", *(f"{c:>16}" for c in b)]) + " |" for a, *b in lines
    )


def main() -> None:
    options = dict(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser = ArgumentParser(usage=SUPPRESS, allow_abbrev=False, **options)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="its name on the hub or folder")
    parser.add_argument("--gpu_gib", type=float, help="default: this machine's; 0 is a CPU's run")
    args, settings = parser.parse_known_args()
    argv = sys.argv[1:]
    if settings and (not args.model or argv.index(settings[0]) < argv.index(args.model)):
        parser.error("MODEL must come before the settings of pods.py")
    if args.gpu_gib is None and torch.cuda.is_available():
        args.gpu_gib = torch.cuda.get_device_properties(0).total_memory / GIB
    gpu_bytes = GIB * (args.gpu_gib or 0)

    import pods  # takes seconds, since it imports vLLM

    if not args.model:
        cfg, columns = pods.Config(gradient_checkpointing=True), {}
        for size, (*_, gib) in QWEN.items():
            parts = predict(cfg, qwen_config(size), gib * GIB, pods.LOGITS_AT_ONCE)
            columns[f"{size} on {gib} GiB"] = parts
        print(table(columns))
        return
    try:
        cfg = pods.parse_settings([f"--model={args.model}", *settings])
        config = AutoConfig.from_pretrained(cfg.model)
        parts = predict(cfg, config, gpu_bytes, pods.LOGITS_AT_ONCE)
    except (pods.Refusal, OSError, ValueError) as error:
        parser.error(" ".join(str(error).split())[:400])
    print(table({f"on {gpu_bytes / GIB:.4g} GiB" if gpu_bytes else "on a CPU": parts}))
    if gpu_bytes and (max(in_all(parts)) > gpu_bytes or not parts[CACHE][0]):
        print("No room: lower --micro_batch_tokens, or change --gpu_memory_utilization.")


if __name__ == "__main__":
    main()
