"""The problems of `--data easy`: one-step word problems in GSM8K's form, for models too small for GSM8K."""

import random

FORMS = {
    "+": "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
    "-": "{name} has {a} {things} and gives away {b}. How many {things} are left?",
    "*": "{name} has {a} boxes with {b} {things} in each. How many {things} are in the boxes?",
}
NAMES = ["Tom", "Anna", "Sam", "Lily", "Ben", "Mia"]
THINGS = ["apples", "pens", "books", "cards", "coins", "shells"]


def easy_problems(split: str) -> list[dict]:
    """The 390 "train" or 210 "test" problems, always the same: {"question": ..., "answer": "... #### 7"}.

    Adding, taking away and multiplying two different numbers from 2 to 10, with a result of at most 50. A
    pair of numbers is in one split only, so nothing of the test can be learned by heart.
    """
    rng = random.Random(0)
    pairs = [(a, b) for a in range(3, 11) for b in range(2, a)]
    rng.shuffle(pairs)
    problems = []
    for a, b in pairs[:12] if split == "test" else pairs[12:]:
        for sign, result in {"+": a + b, "-": a - b, "*": a * b}.items():
            for name in NAMES if result <= 50 else []:
                question = FORMS[sign].format(name=name, a=a, b=b, things=rng.choice(THINGS))
                problems.append({"question": question, "answer": f"{a} {sign} {b} = {result}\n#### {result}"})
    return problems
