"""Tasks: where prompts come from and how an answer is graded.

A task owns four things, and nothing else in the repository knows them: its problems, the text of a prompt, the
tokenizer's words, and the reward. Two tasks stand here.

`arith`  generated and endless: chains of sums with worked steps, over a vocabulary in which every number 0..199 is one
         token. "38 + 7 - 12 :" wants "38 + 7 = 45 ; 45 - 12 = 33 # 33". A model that knows each step with probability
         q solves n of them with q^n, so accuracy climbs smoothly as RL sharpens the steps: there is no all-or-nothing
         skill. Train and test are disjoint by a hash of the problem's text, whatever the seed.
`FILE.jsonl`  real mathematics: lines with `problem` or `question`, and `answer`; graded by the math-verify library.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

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


class Arithmetic:
    """Running totals: `ops` operations (a range), operands 1..`operand`, every total inside 0..`total`.

    explain > 0 asks for long responses, as Mismatch Praxis does: after the answer may come an explanation, and a right answer
    earns 1 + min(tokens behind it, explain) / explain. The demonstrations restate steps there, five on average."""

    name = "arith"
    size = None  # endless

    def __init__(
        self, min_ops: int = 3, max_ops: int = 5, operand: int = 9, total: int = 29, seed: int = 0, explain: int = 0
    ):
        self.min_ops, self.max_ops, self.operand, self.total, self.seed, self.explain = (
            min_ops,
            max_ops,
            operand,
            total,
            seed,
            explain,
        )

    def problem(self, split: str, index: int) -> Problem:
        """Problem number `index` of a split ("train" or "test"): the same one for the same seed, on any machine."""
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
                text += f" {'+' if plus else '-'} {b}"
            held_out = hashlib.sha256(text.encode()).digest()[0] < 32  # one problem in eight is for testing
            if held_out == (split == "test"):
                return Problem(text, text + " :", str(total))
        raise ValueError(f"no {split} problem in 1000 draws: raise --task_max_ops or --task_operand")

    def find(self, id: str) -> Problem:
        """The problem of an id: its text says it all."""
        words = id.split()
        return Problem(
            id,
            id + " :",
            str(int(words[0]) + sum(int(b) if s == "+" else -int(b) for s, b in zip(words[1::2], words[2::2]))),
        )

    def solution(self, problem: Problem, slips: float = 0.0) -> str:
        """Worked steps, for the warm start only. With probability `slips` a step's result is off by 1 or 2 and the rest
        goes on from there, as a careless pupil would: then the final answer is usually wrong."""
        rng, words = random.Random(f"slips/{self.seed}/{problem.id}"), problem.id.split()
        total, steps = int(words[0]), []
        for sign, b in zip(words[1::2], words[2::2]):
            new = total + int(b) if sign == "+" else total - int(b)
            if rng.random() < slips:
                new = min(max(new + rng.choice((-2, -1, 1, 2)), 0), NUMBERS - 1)
            steps.append(f"{total} {sign} {b} = {new}")
            total = new
        text, said = " ; ".join(steps) + f" # {total}", 0
        while 6 * (said + 1) <= min(self.explain, 96) and rng.random() < 0.85:
            text, said = text + f" ; {rng.choice(steps)}", said + 1
        return text

    def reward(self, problem: Problem, text: str, finished: bool) -> float:
        """1 if the response ends, and ends with `# ANSWER`, else 0. With `explain`: one `#`, a right answer behind it, and the bonus."""
        if self.explain:
            found = re.search(r"^[^#]*# (\d+)((?: [^#]+)?)$", text.strip())
            right = found is not None and found.group(1) == problem.answer
            return right * (1.0 + min(len(found.group(2).split()), self.explain) / self.explain) if right else 0.0
        found = re.search(r"# (\d+)\s*$", text)
        return float(finished and found is not None and found.group(1) == problem.answer)

    def max_prompt(self) -> int:
        return 2 * self.max_ops + 2

    def max_response(self) -> int:
        return 6 * self.max_ops + 2 + self.explain


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
    """Problems from a JSONL file; answers graded with math-verify. Bad lines are named before anything loads."""

    def __init__(self, path: str, seed: int = 0):
        self.name, self.seed, self.rows = str(path), seed, read_jsonl(path)
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
        return float(grade(text, problem.answer))

    def max_prompt(self) -> int:
        return 0  # unknown without a tokenizer: checked as prompts are read


def read_jsonl(path: str | Path) -> list[dict]:
    """Rows {text, answer} of a file with `problem` or `question`, and `answer`. ValueError names file and line."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"--task={path}: no such file; give `arith` or the path of a JSONL file")
    rows = []
    for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as e:
            raise ValueError(f"{path}, line {n}: not valid JSON ({e.msg}); mend or remove that line") from None
        if not isinstance(row, dict):
            raise ValueError(
                f"{path}, line {n}: not a JSON object; each line needs `problem` (or `question`) and `answer`"
            )
        text = row.get("problem", row.get("question"))
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{path}, line {n}: no `problem` or `question` text; add one")
        if not isinstance(row.get("answer"), (str, int, float)) or str(row["answer"]).strip() == "":
            raise ValueError(f"{path}, line {n}: no `answer`; add one")
        rows.append({"text": text, "answer": final_answer(str(row["answer"]))})
    if not rows:
        raise ValueError(f"{path}: no problems in the file; each line needs `problem` (or `question`) and `answer`")
    return rows


def final_answer(answer: str) -> str:
    """GSM8K writes its answer behind `####`; every other file writes it bare."""
    return answer.split("####")[-1].strip()


def grade(response: str, answer: str) -> bool:
    """Does the response's final answer equal the gold one? math-verify, on \\boxed{} first, then on the last expression."""
    from math_verify import LatexExtractionConfig, ExprExtractionConfig, parse, verify

    configs = [LatexExtractionConfig(), ExprExtractionConfig()]
    gold = parse(f"\\boxed{{{answer}}}", extraction_config=configs, parsing_timeout=None)
    return bool(verify(gold, parse(response, extraction_config=configs, parsing_timeout=None), timeout_seconds=None))


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
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.prompt}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
    return tokenizer.encode(problem.prompt)


def grade_all(task, tokenizer, problems, groups) -> None:
    """Write each response's reward. The text graded is without special tokens; `finished` says it ended by itself."""
    texts = tokenizer.batch_decode([r.tokens for g in groups for r in g], skip_special_tokens=True)
    flat = ((p, r) for p, g in zip(problems, groups) for r in g)
    for (problem, response), text in zip(flat, texts):
        response.reward = task.reward(problem, text, response.finish_reason == "stop")
