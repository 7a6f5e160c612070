"""Ask a trained model a question:  python extras/ask.py runs/NAME/model "Mia has 8 pens ..." [--example]"""

import argparse
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from rewards import build_messages

parser = argparse.ArgumentParser(description="Ask a trained model a question.")
parser.add_argument("model", help="its folder, as in runs/NAME/model")
parser.add_argument("question")
parser.add_argument("--example", action="store_true", help="show it a solved problem, as in its training")
args = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForCausalLM.from_pretrained(args.model)
messages = build_messages(args.question, args.example)
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
output = model.generate(**inputs, max_new_tokens=256, do_sample=False)
answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
# What a model writes may hold the control characters of a terminal.
print("".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in answer))
