"""What the model is asked on GSM8K, which number its text gives as the answer, and the reward.

Needs only Python and works alone. All of it takes time linear in the text: in training, models do write
"</think>" a hundred times in a row, on which a regular expression with a lazy .*? goes quadratic. What
pods.py takes from here, to change for another task: build_messages, gold_answer, reward (any finite number),
and for the evaluation is_correct and is_well_formed.
"""

import re
from fractions import Fraction

TAGS = ("<think>", "</think>", "<answer>", "</answer>")

SYSTEM_PROMPT = (
    "Solve the math problem. Reason inside <think> and </think>, then write the answer, a single number, "
    "inside <answer> and </answer>, and nothing else."
)
# Its numbers are in none of the easy problems. With it, their prompts fill four blocks of vLLM's cache.
ASKED = "Rosa has 3 red bags with 21 pencils in each of them. How many pencils does Rosa have in all?"
SOLVED = "<think> 3 * 21 = 63 </think> <answer> 63 </answer>"
EXAMPLE = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": SOLVED}]

NUMBER = re.compile(
    r"""(?: (?<![\w)\]}%-]) (?<![\d)\]}%][ ]) (-) [$€£\\*({]* )?        # a minus that is a sign
        (?<![\w^]) (?<!\^\{)                                            # not the 2 of CO2, m^2 and m^{2}
        ((?:(?<!\.)\.)? \d (?:[\d.,/^] | e[-+]?\d)*)                    # everything written as one""",
    re.VERBOSE | re.IGNORECASE,
)
READABLE = re.compile(r"[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?|[0-9]*\.?[0-9]+|[0-9]+/0*[1-9][0-9]*")


def build_messages(question: str, example: bool = False) -> list[dict]:
    """The chat that asks `question`, after one solved problem if `example`."""
    # Always with a system message: without one, Qwen2.5's template adds its own (LlamaFactory#10772).
    system = {"role": "system", "content": SYSTEM_PROMPT}
    return [system, *(EXAMPLE if example else []), {"role": "user", "content": question}]


def last_number(text: str) -> str | None:
    r"""The last number in `text`, as Fraction reads it ("1234.00", "-3", "1/2"), or None.

    The one set of rules for model answers and gold answers:
    - Commas group thousands by three, also as 1{,}234; a point is decimal; a/b and \frac{a}{b} are fractions.
    - Currency, units, percent, bold and a full stop are ignored. A mixed number is read as its fraction.
    - A minus, - or U+2212, is a sign if it touches the number or its currency, or follows "=". It is none
      after a digit, closing bracket or % (16-7, 16 -7), right after a letter or minus, or if spaced (- 7).
    - Digits in a word or an exponent (CO2, m^2) are no number. "18, 19" are two, and so are "70 000".
    - 1,23  1.2.3  1/0  1e5  2^3, digits of other scripts (which \d takes) and anything over 50 characters are
      unreadable. An unreadable last number is not skipped: the answer is then None.
    """
    text = text.replace("\u2212", "-").replace("{,}", ",").replace("\\!", "")
    text = re.sub(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}", r"(\1/\2)", text)
    text = re.sub(r"= ?- ", "= -", re.sub(r"[^\S\n]+", " ", text))
    minus, digits = (NUMBER.findall(text) or [("", "")])[-1]
    digits = digits.rstrip(".,/")
    return minus + digits.replace(",", "") if len(digits) <= 50 and READABLE.fullmatch(digits) else None


def number_after_hashes(text: str) -> str | None:
    """The number that follows the last "####" on its line. None if letters do: then it is a heading."""
    _, hashes, rest = text.rpartition("####")
    line = rest.partition("\n")[0]
    return last_number(line) if hashes and not any(map(str.isalpha, line)) else None


def gold_answer(solution: str) -> str:
    """The number after the last "####" of a GSM8K solution: "1080" for "#### 1,080". ValueError without."""
    if (number := number_after_hashes(solution)) is None:
        raise ValueError(f"the solution does not end in '#### number' but in {solution[-60:]!r}")
    return number


def extract_answer(text: str) -> str | None:
    r"""The number that `text` gives as its answer, as `last_number` writes it, or None. It is looked for in

    1. the last complete <answer> block, even one inside <think>; if there is one, nothing else counts
    2. the line of the last "####", if a number follows there and no letters
    3. the last \boxed{}, if it is complete; nothing else counts then
    4. the whole text, so that a right answer without its tags is still right

    and where there are several numbers, the last one counts: "16 - 7 = 9" says 9. An unfinished <answer> is
    no block, so it is read by 4: its completion says the answer, but earns less for its tags.
    """
    _, opened, block = text.rpartition("</answer>")[0].rpartition("<answer>")
    if opened:
        return last_number(block.partition("</answer>")[0])
    if (number := number_after_hashes(text)) is not None:
        return number
    _, opened, rest = text.rpartition("\\boxed{")
    depth = 1  # open braces: \boxed{\frac{1}{2}} ends at its third }
    for i, character in enumerate(rest if opened else ""):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return last_number(rest[:i])
    return last_number(text)


def is_correct(text: str, gold: str) -> bool:
    """Whether the answer of `text` equals `gold` exactly: 29.00 is 29. ValueError if `gold` has no number."""
    if (gold_number := last_number(gold)) is None:  # scored as right (open-r1#566) or wrong, it stays unseen
        raise ValueError(f"the gold answer {gold!r} is not a readable number")
    answer = extract_answer(text)
    return answer is not None and Fraction(answer) == Fraction(gold_number)


def format_score(text: str) -> float:
    """1 for <think>...</think> <answer>...</answer>, less 0.01 for each character around it, never below 0.

    0 without it. As in the code of the paper's authors (YixuanEvenXu/pods, utils/data.py), it goes from the
    first <think> to the last </answer>; we allow any white space between the blocks, not only one character.
    """
    start, end = text.find("<think>"), text.rfind("</answer>")
    if start < 0 or end < 0 or not re.compile(r"</think>\s*<answer>").search(text, start, end):
        return 0.0
    return max(0.0, 1 - 0.01 * (start + len(text) - end - len("</answer>")))


def is_well_formed(text: str) -> bool:
    """Whether `text` is <think>...</think> <answer>...</answer>, each tag once, only white space around."""
    return all(text.count(tag) == 1 for tag in TAGS) and format_score(text.strip()) == 1


def reward(text: str, gold: str) -> float:
    """1 if correct, + 0.1 format_score, + 0.025 for each tag that occurs once: from 0 to 1.2.

    The reward of the authors' code (the same file, commit 187f43b), but for what is correct: their grader can
    lose a minus and accepts the answer in any of three places. ValueError as in `is_correct`.
    """
    tags_once = sum(text.count(tag) == 1 for tag in TAGS)
    return is_correct(text, gold) + 0.1 * format_score(text) + 0.025 * tags_once
