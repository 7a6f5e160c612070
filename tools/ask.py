"""Asks a trained model a question and prints its greedy answer, as in the run's evaluations.

    python -m tools.ask runs/cpu-demo "Mia has 8 pens and gets 5 more. How many has she now?"

Given the folder of a run, it takes the run's model and asks as the run asked, with or without the
solved problem that comes first. It also takes a model: a folder, or a name on the hub.
"""

from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import torch
from jinja2 import TemplateError
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

from rewards import build_messages
from tools.run_files import plain, read_config


def find_model(place: str) -> tuple[str, dict]:
    """Folder or name of the model, and the settings of its run, {} if it comes from none.

    Raises ValueError for a run that is not there or not finished.
    """
    path = Path(place)
    if path.parent.is_dir() and not path.exists():  # else asked of the hub, which may take long
        raise ValueError("there is no such folder")
    run = path.parent if path.name == "model" else path
    if not (run / "metrics.jsonl").exists():
        return place, {}
    if not (run / "model").is_dir():
        raise ValueError(f"{run} has no model yet: the run is not finished")
    return str(run / "model"), read_config(run)


def encode(question: str, tokenizer, example: bool) -> torch.Tensor:
    """The prompt, token ids (1, L). As pods.encode does it, whose import would load vLLM, too."""
    options = dict(add_generation_prompt=True, return_tensors="pt", return_dict=False)
    try:
        return tokenizer.apply_chat_template(build_messages(question, example), **options)
    except TemplateError:  # a template that refuses system messages, like Gemma's
        chat = build_messages(question, example, system_role=False)
        return tokenizer.apply_chat_template(chat, **options)


def answer(model, tokenizer, prompt: torch.Tensor, max_new_tokens: int) -> str:
    """The greedy completion of a prompt of token ids (1, L)."""
    # Of the model's generation_config only what ends a text: a repetition penalty, as Qwen2.5 has
    # one, would change the answer, and the run did not use it.
    ends, own = {tokenizer.eos_token_id}, model.generation_config.eos_token_id
    ends |= set(own) if isinstance(own, list) else {own}
    ends = sorted(ends - {None})
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=ends[0])
    prompt = prompt.to(model.device)
    options = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens)
    ids = model.generate(prompt, **options)[0, prompt.shape[1] :]
    return tokenizer.decode(ids, skip_special_tokens=True)


def main() -> None:
    options = dict(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser = ArgumentParser(usage=SUPPRESS, **options)
    parser.add_argument("model", metavar="RUN_OR_MODEL", help="runs/NAME, or a chat model")
    parser.add_argument("question")
    parser.add_argument("--example", action="store_true", help="show a solved problem first")
    args = parser.parse_args()
    logging.disable_progress_bar()
    try:
        source, settings = find_model(args.model)
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source)
        prompt = encode(args.question, tokenizer, args.example or settings.get("example", False))
    except (OSError, ValueError) as error:
        parser.error(f"cannot ask {args.model}: {' '.join(str(error).split())[:400]}")
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    print(plain(answer(model, tokenizer, prompt, settings.get("max_new_tokens", 512))))


if __name__ == "__main__":
    main()
