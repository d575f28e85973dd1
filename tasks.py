"""Tasks: where prompts come from and how an answer is graded.

A task owns four things, and nothing else in the repository knows them: its problems, the text of a
prompt, the tokenizer's words, and the reward. There are two tasks:

`arith`  generated and endless: chains of sums with worked steps, over a vocabulary in which every
         number 0..199 is one token. "38 + 7 - 12 :" wants "38 + 7 = 45 ; 45 - 12 = 33 # 33". A model
         that knows each step with probability q solves n of them with q^n, so accuracy climbs
         smoothly as RL sharpens the steps: there is no all-or-nothing skill. Train and test are
         disjoint by a hash of the problem's text, whatever the seed.
`FILE.jsonl`  real mathematics: lines with `problem` or `question`, and `answer`; graded by the
         math-verify library.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

from flags import UserError

NUMBERS = 200  # the numbers 0..199 are one token each
VOCAB = 256  # numbers, signs, and spare words up to a multiple of 32
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Problem:
    """One question. `id` is stable across runs; `answer` is what `reward` compares with."""

    id: str
    prompt: str
    answer: str


# ---------------------------------------------------------------------------------------------------------------------
# Generated arithmetic with worked steps
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Arithmetic:
    """Chains of min_ops to max_ops sums, operands 1..operand, every running total inside 0..total.

    explain > 0 asks for long responses, as Mismatch Praxis does: an explanation may follow the
    answer, and a right answer earns 1 + min(tokens behind it, explain) / explain. The demonstrations
    restate steps there, five on average."""

    min_ops: int = 3
    max_ops: int = 5
    operand: int = 9
    total: int = 29
    seed: int = 0
    explain: int = 0

    name = "arith"
    size = None  # endless

    def problem(self, split: str, index: int) -> Problem:
        """Problem number `index` of a split ("train" or "test"): a pure function of the seed."""
        for attempt in range(1000):
            rng = random.Random(f"{self.seed}/{split}/{index}/{attempt}")
            total = rng.randint(0, self.total)
            text = str(total)
            for _ in range(rng.randint(self.min_ops, self.max_ops)):
                b = rng.randint(1, self.operand)
                plus = rng.random() < 0.5
                if total + b > self.total or total - b < 0:
                    plus = total < b  # the one direction that stays inside the range
                total += b if plus else -b
                text += f" + {b}" if plus else f" - {b}"
            # One problem in eight is for testing.
            held_out = hashlib.sha256(text.encode()).digest()[0] < 32
            if held_out == (split == "test"):
                return Problem(text, text + " :", str(total))
        raise UserError(f"no {split} problem in 1000 draws: raise --task_max_ops or --task_operand")

    def find(self, id: str) -> Problem:
        """The problem of an id, which is its text."""
        start, operations = parts(id)
        answer = start
        for sign, b in operations:
            answer += b if sign == "+" else -b
        return Problem(id, id + " :", str(answer))

    def solution(self, problem: Problem, slips: float = 0.0) -> str:
        """Worked steps, for the warm start only.

        With probability `slips` a step's result is off by 1 or 2 and the rest goes on from there, as
        with a careless pupil: then the final answer is usually wrong."""
        rng = random.Random(f"slips/{self.seed}/{problem.id}")
        total, operations = parts(problem.id)
        steps = []
        for sign, b in operations:
            result = total + b if sign == "+" else total - b
            if rng.random() < slips:
                result = min(max(result + rng.choice((-2, -1, 1, 2)), 0), NUMBERS - 1)
            steps.append(f"{total} {sign} {b} = {result}")
            total = result
        text = " ; ".join(steps) + f" # {total}"
        restated = 0
        while 6 * (restated + 1) <= min(self.explain, 96) and rng.random() < 0.85:
            text += f" ; {rng.choice(steps)}"
            restated += 1
        return text

    def reward(self, problem: Problem, text: str, finished: bool) -> float:
        """1 if the response ends, and ends with `# ANSWER`, else 0.

        With `explain`: one `#` and a right answer behind it earn 1 plus the bonus, ended or not."""
        if self.explain:
            found = re.search(r"^[^#]*# (\d+)((?: [^#]+)?)$", text.strip())
            if found is None or found.group(1) != problem.answer:
                return 0.0
            return 1.0 + min(len(found.group(2).split()), self.explain) / self.explain
        found = re.search(r"# (\d+)\s*$", text)
        return float(finished and found is not None and found.group(1) == problem.answer)

    def max_prompt(self) -> int:
        """Tokens of the longest prompt: the start, two for each operation, the colon."""
        return 2 * self.max_ops + 2

    def max_response(self) -> int:
        """Tokens of the longest demonstration: six a step, the answer, the end, the explanation."""
        return 6 * self.max_ops + 2 + self.explain


def parts(text: str) -> tuple[int, list[tuple[str, int]]]:
    """A problem's start and operations: "38 + 7 - 12" gives 38 and [("+", 7), ("-", 12)]."""
    words = text.split()
    operations = [(sign, int(b)) for sign, b in zip(words[1::2], words[2::2], strict=True)]
    return int(words[0]), operations


def arithmetic_tokenizer():
    """A word-level Hugging Face tokenizer: numbers, signs, and unused words up to VOCAB."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", "+", "-", "=", ";", ":", "#"] + [str(i) for i in range(NUMBERS)]
    words += [f"<spare{i}>" for i in range(VOCAB - len(words))]
    tok = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tok, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


# ---------------------------------------------------------------------------------------------------------------------
# Files of real problems
# ---------------------------------------------------------------------------------------------------------------------


class Jsonl:
    """Problems from a JSONL file; answers graded with math-verify.

    A bad line is named before anything loads."""

    def __init__(self, path: str, seed: int = 0):
        self.name = str(path)
        self.seed = seed
        self.rows = read_jsonl(path)
        self.size = len(self.rows)

    def problem(self, split: str, index: int) -> Problem:
        """Test: file order. Train: every epoch a new shuffle of the whole file."""
        if split == "train":
            epoch, at = divmod(index, self.size)
            order = list(range(self.size))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            index = order[at]
        return self.find(f"{Path(self.name).stem}/{index % self.size}")

    def find(self, id: str) -> Problem:
        """The problem of an id: FILE/ROW."""
        row = self.rows[int(id.rsplit("/", 1)[1])]
        text = row["text"] if "\\boxed" in row["text"] else row["text"] + BOXED
        return Problem(id, text, row["answer"])

    def reward(self, problem: Problem, text: str, finished: bool) -> float:
        """1 for a right answer, else 0, whether or not the response ended by itself."""
        return float(grade(text, problem.answer))

    def max_prompt(self) -> int:
        return 0  # unknown without a tokenizer: checked as prompts are read


def read_jsonl(path: str | Path) -> list[dict]:
    """Rows {text, answer} of a JSONL file. UserError, one sentence, names file and line."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"--task={path}: no such file; give `arith` or the path of a JSONL file")
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [read_row(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise UserError(f"{path}: no problems in the file; each line needs `problem` (or `question`) and `answer`")
    return rows


def read_row(line: str, place: str) -> dict:
    """One line with `problem` or `question`, and `answer`, as {text, answer}.

    place: file and line, for the UserError."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as e:
        raise UserError(f"{place}: not valid JSON ({e.msg}); mend or remove that line") from None
    if not isinstance(row, dict):
        raise UserError(f"{place}: not a JSON object; each line needs `problem` (or `question`) and `answer`")
    text = row.get("problem", row.get("question"))
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{place}: no `problem` or `question` text; add one")
    answer = row.get("answer")
    if not isinstance(answer, (str, int, float)) or str(answer).strip() == "":
        raise UserError(f"{place}: no `answer`; add one")
    return {"text": text, "answer": final_answer(str(answer))}


def final_answer(answer: str) -> str:
    """GSM8K writes its answer behind `####`; every other file writes it bare."""
    return answer.split("####")[-1].strip()


def grade(response: str, answer: str) -> bool:
    """Does the response's final answer equal the gold one?

    math-verify looks at \\boxed{} first, then at the last expression."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    configs = [LatexExtractionConfig(), ExprExtractionConfig()]
    gold = parse(f"\\boxed{{{answer}}}", extraction_config=configs, parsing_timeout=None)
    found = parse(response, extraction_config=configs, parsing_timeout=None)
    return bool(verify(gold, found, timeout_seconds=None))


# ---------------------------------------------------------------------------------------------------------------------
# What the rest of the repository asks of a task
# ---------------------------------------------------------------------------------------------------------------------


def make_task(cfg):
    """The task named by `--task`: `arith`, or the path of a JSONL file."""
    if cfg.task == "arith":
        return Arithmetic(
            cfg.task_min_ops, cfg.task_max_ops, cfg.task_operand, cfg.task_total, cfg.task_seed, cfg.task_explain
        )
    return Jsonl(cfg.task, cfg.task_seed)


def encode(tokenizer, problem) -> list[int]:
    """Token ids of a problem's prompt, through the chat template where the tokenizer has one."""
    if getattr(tokenizer, "chat_template", None):
        chat = [{"role": "user", "content": problem.prompt}]
        return tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
    return tokenizer.encode(problem.prompt)


def grade_all(task, tokenizer, problems, groups) -> None:
    """Write each response's reward. problems: one for each group; groups: lists of responses.

    The text graded is without special tokens; `finished` says that the response ended by itself."""
    tokens = [r.tokens for g in groups for r in g]
    texts = iter(tokenizer.batch_decode(tokens, skip_special_tokens=True))
    for problem, responses in zip(problems, groups, strict=True):
        for response in responses:
            response.reward = task.reward(problem, next(texts), response.finish_reason == "stop")


def check(cfg) -> None:
    """UserError, one sentence, if the task_* flags allow no problem."""
    if cfg.task != "arith":
        return
    if not 1 <= cfg.task_min_ops <= cfg.task_max_ops:
        raise UserError(f"--task_min_ops={cfg.task_min_ops}: must be between 1 and --task_max_ops={cfg.task_max_ops}")
    if cfg.task_explain < 0:
        raise UserError(f"--task_explain={cfg.task_explain}: must be 0 (no explanations) or more tokens")
    if not 1 <= cfg.task_operand <= cfg.task_total < NUMBERS:
        raise UserError(
            f"--task_total={cfg.task_total}: must be below {NUMBERS} and no less than --task_operand={cfg.task_operand}"
        )
