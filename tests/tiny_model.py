"""A model for tests: random, tiny, with a tokenizer. A plugin of pytest (see pyproject.toml)."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from rewards import TAGS

TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SIZES = dict(
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=2048,
    initializer_range=0.1,
)


def make_model(folder: Path, config_class: type, template: str = TEMPLATE, **settings) -> Path:
    """Saves a random model and a byte-level tokenizer, whose pad token is its eos, in `folder`.

    Each tag is one token, so that now and then a random completion has one, and rewards vary.
    """
    byte_tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(byte_tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>"
    )
    tokenizer.add_tokens(list(TAGS))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    ids = dict(eos_token_id=tokenizer.eos_token_id, bos_token_id=None, pad_token_id=None)
    settings = dict(vocab_size=len(tokenizer), tie_word_embeddings=True) | SIZES | ids | settings
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_class(**settings)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """The folder of a tiny Qwen2 with tied embeddings."""
    return make_model(tmp_path_factory.mktemp("tiny"), Qwen2Config)
