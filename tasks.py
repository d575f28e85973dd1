"""Tasks: where prompts come from and how an answer is graded.

A task owns four things, and nothing else in the repository knows them: its problems, the text of a
prompt, the tokenizer's words, and the reward. There are two tasks:

`arith`  generated and endless: chains of sums with worked steps, over a vocabulary in which every
         number 0..199 is one token. "38 + 7 - 12 :" wants "38 + 7 = 45 ; 45 - 12 = 33 # 33". A model
         that knows each step with probability q solves n of them with q^n, so accuracy climbs
         smoothly as RL sharpens the steps: there is no all-or-nothing skill. Train and test are
         disjoint by a hash of the problem's text, whatever the seed.
`FILE.jsonl`  real mathematics: lines with `problem` or `question`, and `answer`; graded by the
         math-verify library, in processes of their own: what a model writes may take for ever to
         compare, and such an answer must cost neither the run nor the others.

`python tasks.py FD` is one of these processes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import math
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

from flags import UserError, from_environment, need, read_text

NUMBERS = 200  # the numbers 0..199 are one token each
VOCAB = 256  # numbers, signs, and spare words up to a multiple of 32
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Problem:
    """One question. `id` is stable across runs; `answer` is what `reward` compares with."""

    id: str
    prompt: str
    answer: str


@dataclass(frozen=True)
class Answer:
    """A response to a problem, as the grader sees it: its text, and whether it ended by itself."""

    problem: Problem
    text: str
    finished: bool


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

    def rewards(self, answers: list[Answer]) -> tuple[list[float], Counter]:
        """The reward of each answer, and no counts."""
        return [self.reward(a.problem, a.text, a.finished) for a in answers], Counter()

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

    answer: "boxed" or "last", what of a response counts (--answer). seconds: of a processor, for each answer. flag: the
    one that names the file.
    A bad line is named before anything loads."""

    def __init__(self, path: str, seed: int = 0, answer: str = "boxed", seconds: float = 5.0, flag: str = "task"):
        installed = importlib.util.find_spec("math_verify") is not None
        need(installed, f"--{flag}={path}: math-verify, which grades it, is not installed; pip install math-verify")
        self.name = str(path)
        self.seed = seed
        self.answer = answer
        self.seconds = seconds
        self.rows = read_jsonl(path, flag)
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

    def rewards(self, answers: list[Answer]) -> tuple[list[float], Counter]:
        """1 for a right answer, else 0, whether or not the response ended by itself; and counts.

        The counts: `answers`; `timeouts`, those that could not be graded within the limit; `unboxed`, those
        without a \\boxed{}. Equal answers to one problem are graded once."""
        boxes = [last_box(a.text) for a in answers]
        texts = [a.text for a in answers] if self.answer == "last" else boxes
        pairs = [(text, a.problem.answer) for text, a in zip(texts, answers, strict=True)]
        different = [pair for pair in dict.fromkeys(pairs) if pair[0] is not None]
        verdicts = dict(zip(different, graders().grade(different, self.seconds), strict=True))
        counts = Counter(
            answers=len(answers),
            timeouts=sum(pair in verdicts and verdicts[pair] is None for pair in pairs),
            unboxed=boxes.count(None),
        )
        return [float(verdicts.get(pair) or 0.0) for pair in pairs], counts

    def max_prompt(self) -> int:
        return 0  # unknown without a tokenizer: checked as prompts are read


def read_jsonl(path: str | Path, flag: str = "task") -> list[dict]:
    """Rows {text, answer} of a JSONL file. UserError, one sentence, names file and line. flag: that named the file."""
    named, path = path, Path(path)
    also = "`arith` or " if flag == "task" else ""
    if not path.is_file():
        what = "a folder" if path.is_dir() else "no such file"
        raise UserError(f"--{flag}={named}: {what}; give {also}the path of a JSONL file")
    lines = read_text(path).split("\n")  # not splitlines(), which also divides where JSON does not
    rows = [read_row(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise UserError(f"{path}: no problems in the file; each line needs `problem` (or `question`) and `answer`")
    return rows


def read_row(line: str, place: str) -> dict:
    """One line with `problem` or `question`, and `answer`, as {text, answer}.

    place: file and line, for the UserError."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:  # also numbers of thousands of digits, and endless brackets
        why = str(getattr(e, "msg", e))[:60]
        raise UserError(f"{place}: not valid JSON ({why}); mend or remove that line, one object a line") from None
    if not isinstance(row, dict):
        raise UserError(f"{place}: not a JSON object; each line needs `problem` (or `question`) and `answer`")
    text = row.get("problem") or row.get("question")
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{place}: no `problem` or `question` text; add one")
    answer = row.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        raise UserError(f"{place}: no `answer` that is a text or a number; add one")
    answer = final_answer(str(answer))
    encodable = (text + answer).encode(errors="replace").decode() == text + answer
    need(encodable, f"{place}: half a character (a lone surrogate), which no tokenizer takes; mend or remove that line")
    need(answer, f"{place}: the `answer` is empty; add one, or remove that line")
    finite = answer.lower().lstrip("+-") not in ("nan", "inf")
    need(finite, f"{place}: the `answer` is {answer}, which no response can equal; mend or remove that line")
    return {"text": text, "answer": answer}


def final_answer(answer: str) -> str:
    """GSM8K writes its answer behind `####`; every other file writes it bare."""
    return answer.split("####")[-1].strip()


# ---------------------------------------------------------------------------------------------------------------------
# Grading with math-verify
# ---------------------------------------------------------------------------------------------------------------------

CHUNK = 16  # answers that a process is given at once, at most
MEMORY = 4 << 30  # bytes of address space of each process
TICK = 0.2  # seconds after which a wait is looked at again
SILENCE = 60.0  # seconds after which a process that says nothing is given up, beside ten times an answer's limit
MOST_STILLBORN = 3  # processes that may end before they are ready


def last_box(text: str) -> str | None:
    """The last \\boxed{...} of a response, whole; None if there is none, or if the last one is cut short or empty.

    Its braces are counted; a brace behind a backslash, as in \\{1, 2\\}, is a sign and not counted."""
    starts = [match.end() for match in re.finditer(r"\\boxed\s*\{", text)]
    if not starts:
        return None
    depth = 1
    for match in re.finditer(r"\\.|[{}]", text[starts[-1] :], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            inside = text[starts[-1] : starts[-1] + match.start()]
            return f"\\boxed{{{inside}}}" if inside.strip() else None
    return None


def grade(response: str, answer: str) -> bool:
    """Does the response's final answer equal the gold one? It may take for ever: `Graders` knows how to end it.

    math-verify looks at \\boxed{} first, then at the last expression. sympy tries numbers of its own at random: with
    a seed for each answer, the verdict does not depend on the answers before."""
    import sympy.core.random
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    sympy.core.random.seed(0)
    configs = [LatexExtractionConfig(), ExprExtractionConfig()]
    gold = parse(f"\\boxed{{{answer}}}", extraction_config=configs, parsing_timeout=None)
    found = parse(response, extraction_config=configs, parsing_timeout=None)
    return bool(verify(gold, found, timeout_seconds=None))


def grading_process(fd: int) -> None:
    """The whole life of a process that grades: answers in, verdicts out, until the other end of the socket `fd` closes.

    A timer ends it where an answer needs more than its share of the processor: the kernel's own default action, for
    Python cannot act while one big number is computed. Ctrl-C and SIGTERM are the parent's affair."""
    import resource
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    grade("\\boxed{1}", "1")  # everything is loaded now, and not at the cost of the first answer
    with Connection(fd) as connection, contextlib.suppress(EOFError, OSError):
        connection.send("ready")
        while True:
            pairs, seconds = connection.recv()
            for response, answer in pairs:
                signal.setitimer(signal.ITIMER_PROF, seconds)
                verdict = grade(response, answer)
                signal.setitimer(signal.ITIMER_PROF, 0)
                connection.send(verdict)


class Grader:
    """A grading process, seen from here."""

    def __init__(self):
        self.connection, theirs = Pipe()
        fd = theirs.fileno()
        # sympy walks through sets, whose order depends on the hash seed: the same one in every process
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(fd)],
            env={**os.environ, "PYTHONHASHSEED": "0"},
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        self.ready = False
        self.given: deque[int] = deque()  # numbers of the answers it has not said anything about
        self.heard = time.monotonic()  # when it was last heard of, or given something

    def give(self, numbers: list[int], pairs: list[tuple[str, str]], seconds: float) -> None:
        self.given.extend(numbers)
        self.heard = time.monotonic()
        with contextlib.suppress(OSError):  # it has died: the next look at its connection tells
            self.connection.send((pairs, seconds))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


class Graders:
    """Up to `size` grading processes, started when they are needed and kept. `graders()` gives the only instance."""

    def __init__(self, size: int):
        self.size = size
        self.processes: list[Grader] = []
        self.stillborn = 0

    def grade(self, pairs: list[tuple[str, str]], seconds: float) -> list[bool | None]:
        """Is each response right? pairs: (response, gold answer). None: its process died of it, or used up its
        seconds of a processor."""
        verdicts: list[bool | None] = [None] * len(pairs)
        todo = deque(range(len(pairs)))
        try:
            while todo or any(p.given for p in self.processes):
                while len(self.processes) < min(self.size, len(todo)):
                    self.processes.append(Grader())
                self._hand_out(todo, pairs, seconds)
                # In slices, so that a signal to this process never has to wait for an answer.
                said = wait([p.connection for p in self.processes], TICK)
                for p in [p for p in self.processes if p.connection in said]:
                    self._listen(p, verdicts, todo)
                for p in self.processes:
                    if (p.given or not p.ready) and time.monotonic() - p.heard > SILENCE + 10 * seconds:
                        p.process.kill()  # stopped, or swapped out
        except BaseException:  # what the processes go on to say would be taken for the next answers
            self.close()
            raise
        return verdicts

    def _hand_out(self, todo: deque[int], pairs, seconds: float) -> None:
        """A chunk for each process that has nothing to do; small ones towards the end, so that all end together."""
        for p in self.processes:
            alive = p.process.poll() is None  # one that died while it had nothing to do is replaced
            if todo and p.ready and not p.given and alive:
                n = min(CHUNK, max(1, len(todo) // (2 * self.size)))
                numbers = [todo.popleft() for _ in range(min(n, len(todo)))]
                p.give(numbers, [pairs[i] for i in numbers], seconds)

    def _listen(self, p: Grader, verdicts: list[bool | None], todo: deque[int]) -> None:
        """Take what a process says. If it has died, the answer at hand is lost, and the others are done again."""
        try:
            said = p.connection.recv()
        except (EOFError, OSError):
            self.processes.remove(p)
            p.end()
            todo.extend(list(p.given)[1:])
            self.stillborn += not p.ready
            if self.stillborn > MOST_STILLBORN:
                raise RuntimeError(
                    f"grading processes end before they are ready (exit code {p.process.returncode}): "
                    "python -c 'import math_verify' may tell why"
                ) from None
            return
        p.heard = time.monotonic()
        if p.ready:
            verdicts[p.given.popleft()] = said
        p.ready = True

    def close(self) -> None:
        while self.processes:
            self.processes.pop().end()


@functools.cache
def graders() -> Graders:
    """The grading processes of this process: as many as there are cores for each rank of this host."""
    return Graders(max(1, len(os.sched_getaffinity(0)) // from_environment("LOCAL_WORLD_SIZE", 1)))


# ---------------------------------------------------------------------------------------------------------------------
# What the rest of the repository asks of a task
# ---------------------------------------------------------------------------------------------------------------------


def make_task(cfg, flag: str = "task"):
    """The task named by `--task`, or by another flag: `arith`, or the path of a JSONL file."""
    name = getattr(cfg, flag)
    if name == "arith":
        return Arithmetic(
            cfg.task_min_ops, cfg.task_max_ops, cfg.task_operand, cfg.task_total, cfg.task_seed, cfg.task_explain
        )
    return Jsonl(name, cfg.task_seed, cfg.answer, cfg.grade_seconds, flag)


def encode(tokenizer, problem) -> list[int]:
    """Token ids of a problem's prompt, through the chat template where the tokenizer has one."""
    if getattr(tokenizer, "chat_template", None):
        chat = [{"role": "user", "content": problem.prompt}]
        return tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
    return tokenizer.encode(problem.prompt)


def grade_all(task, tokenizer, problems, groups) -> Counter:
    """Write each response's reward. problems: one for each group; groups: lists of responses.

    The text graded is without special tokens; `finished` says that the response ended by itself.
    Returns the task's counts (Jsonl.rewards)."""
    responses = [(problem, r) for problem, group in zip(problems, groups, strict=True) for r in group]
    texts = tokenizer.batch_decode([r.tokens for _, r in responses], skip_special_tokens=True)
    answers = []
    for (problem, r), text in zip(responses, texts, strict=True):
        answers.append(Answer(problem, text, r.finish_reason == "stop"))
    rewards, counts = task.rewards(answers)
    for (_, r), reward in zip(responses, rewards, strict=True):
        r.reward = reward
    return counts


def grading_metrics(counts: Counter) -> dict[str, float]:
    """What is logged of counts added up; nothing where no answer went to math-verify."""
    if not counts["answers"]:
        return {}
    return {
        "grade/timeouts": float(counts["timeouts"]),
        "grade/unboxed": counts["unboxed"] / counts["answers"],
    }


def run_stop_ids(tokenizer, cfg) -> list[int]:
    """The ends of a run's responses: of both models, whichever samples, so that one can learn to end as the other."""
    return stop_ids(tokenizer, (cfg.model, cfg.actor), cfg.stop)


def stop_ids(tokenizer, folders, stop: str = "") -> list[int]:
    """Ids of the tokens that end a response, in every engine and in evaluation alike.

    They are the tokenizer's own end, what the generation_config.json of these model folders lists as `eos_token_id`
    (a folder without that file adds nothing), and the tokens of --stop. UserError: one sentence."""
    ids = [tokenizer.eos_token_id]
    for folder in folders:
        path = Path(folder) / "generation_config.json"
        if path.is_file():
            ids += listed_ends(path)
    ids += [token_id(tokenizer, word.strip()) for word in stop.split(",") if word.strip()]
    ids = [i for i in dict.fromkeys(ids) if i is not None]
    need(ids, "the tokenizer has no token that ends a response, and its model lists none: name one with --stop")
    return ids


def listed_ends(path: Path) -> list[int]:
    """The end tokens that a generation_config.json lists: none, one, or several."""
    try:
        listed = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as e:
        raise UserError(f"{path}: not a JSON object ({e}); mend or remove it") from None
    listed = listed if isinstance(listed, list) else [listed]
    bad = [i for i in listed if i is not None and type(i) is not int]
    need(not bad, f"{path}: its eos_token_id lists {bad[:1]}, which is no token's number; mend it")
    return listed


def token_id(tokenizer, word: str) -> int:
    """The id of a token by its text. UserError if it is not exactly one token of the vocabulary."""
    vocabulary = tokenizer.get_vocab()
    if word in vocabulary:
        return vocabulary[word]
    ids = tokenizer.encode(word, add_special_tokens=False)
    need(
        len(ids) == 1 and ids[0] != tokenizer.unk_token_id,
        f"--stop={word}: not one token of the model's vocabulary; give tokens, such as <|im_end|>, separated by commas",
    )
    return ids[0]


def check(cfg) -> None:
    """UserError, one sentence, if the flags of the task allow no problem or no grading."""
    limit = cfg.grade_seconds
    need(0 < limit < math.inf, f"--grade_seconds={limit}: a number of seconds above 0, for each answer")
    if cfg.task != "arith":
        need(
            not cfg.task_explain,
            f"--task_explain={cfg.task_explain}: only --task=arith rewards explanations; leave it out for {cfg.task}",
        )
        return
    if not 1 <= cfg.task_min_ops <= cfg.task_max_ops:
        raise UserError(f"--task_min_ops={cfg.task_min_ops}: must be between 1 and --task_max_ops={cfg.task_max_ops}")
    if cfg.task_explain < 0:
        raise UserError(f"--task_explain={cfg.task_explain}: must be 0 (no explanations) or more tokens")
    if not 1 <= cfg.task_operand <= cfg.task_total < NUMBERS:
        raise UserError(
            f"--task_total={cfg.task_total}: must be below {NUMBERS} and no less than --task_operand={cfg.task_operand}"
        )


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].isdecimal():
        sys.exit("error: tasks.py is started by a run, with a socket's number; see python train.py --help")
    grading_process(int(sys.argv[1]))
