"""Makes the demonstration's problems, train.jsonl and test.jsonl: python data/easy/make.py

One-step word problems in GSM8K's form, for models that are too small for GSM8K: adding, taking
away and multiplying two different numbers from 2 to 10, with a result of at most 50. A pair of
numbers is in one split only, so that nothing of the test can be learned by heart.
"""

import json
import random
from pathlib import Path

FORMS = {
    "+": "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
    "-": "{name} has {a} {things} and gives away {b}. How many {things} are left?",
    "*": "{name} has {a} boxes with {b} {things} in each. How many {things} are in the boxes?",
}
NAMES = ["Tom", "Anna", "Sam", "Lily", "Ben", "Mia"]
THINGS = ["apples", "pens", "books", "cards", "coins", "shells"]
TEST_PAIRS = 12

for split in ("train", "test"):
    rng = random.Random(0)
    pairs = [(a, b) for a in range(3, 11) for b in range(2, a)]
    rng.shuffle(pairs)
    lines = []
    for a, b in pairs[:TEST_PAIRS] if split == "test" else pairs[TEST_PAIRS:]:
        for sign, result in {"+": a + b, "-": a - b, "*": a * b}.items():
            for name in NAMES if result <= 50 else []:
                question = FORMS[sign].format(name=name, a=a, b=b, things=rng.choice(THINGS))
                answer = f"{a} {sign} {b} = {result}\n#### {result}"
                lines.append(json.dumps({"question": question, "answer": answer}) + "\n")
    Path(__file__).with_name(f"{split}.jsonl").write_text("".join(lines))
