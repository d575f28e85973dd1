"""Problems from files and data sets, or from a class in a user's file.

    --task=FILE.jsonl | FILE.json | FILE.parquet | hf:NAME/SPLIT | hf:NAME@CONFIG/SPLIT | FILE.py:CLASS

A row needs a prompt and an answer. --columns=prompt=NAME,answer=NAME names the columns (a.b names a
nested column). Without --columns the first of these is used: problem, question, prompt (a text, or
messages {role, content}); answer, solution with a box, reward_model.ground_truth, answerKey,
Correct Answer. Where a row has choices (`choices`, `options`, or GPQA's wrong answers) they are
written below the question, and the answer becomes a letter. All columns reach the reward; the
answer as a text."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import random
import re
from collections import Counter
from decimal import Decimal
from pathlib import Path

from machinery.flags import UserError, need, read_text, shortened
from tasks.builtin import last_box
from tasks.grading import attribute_of, described
from tasks.prompts import Answer, Problem, Style, encode, encode_all, render
from tasks.rewards import Reward

PROMPTS = ("problem", "question", "prompt", "Question", "Problem")
ANSWERS = (
    "answer",
    "solution",
    "reward_model.ground_truth",
    "answerKey",
    "Correct Answer",
    "Answer",
)
NEEDS = "a row needs `problem` (or `question`, `prompt`) and `answer`, or --columns=prompt=NAME,answer=NAME"
# never meant in a problem: \f, \b and the like, and \r except at the end of a line
CONTROL = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\r(?!\n|$)"
# never meant in an answer: the same, \t, and a line feed that was the \n of \nu, \neq, \nabla, ...
IN_ANSWER = CONTROL + r"|\t|\n(?=(?:u|eq?|eg|abla|ot(?:in)?|leq|geq|mid)\b)"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Table:
    """Problems from the rows of a file or a data set. The train split is a new shuffle of all rows
    in every epoch; the test split is the rows in order."""

    environment = ""  # the function that replies to the model's turns (tasks/turns.py)

    def __init__(self, name: str, rows: list[dict], style: Style, reward: Reward):
        self.name, self.rows, self.style, self.reward = name, rows, style, reward
        self.stem = label_of(name)
        self.total = len(rows)
        self.used = list(range(self.total))  # indices of the rows that are not dropped
        self.dropped = 0
        self.epoch, self.order = -1, []  # the current shuffle

    @property
    def size(self) -> int | None:
        return len(self.used) or None

    def problem(self, split: str, index: int) -> Problem:
        """Problem number `index` of a split, "train" or "test"."""
        epoch, at = divmod(index, self.size)
        if split == "test":
            return self.find(f"{self.stem}/{self.used[at]}")
        if epoch != self.epoch:
            self.epoch, self.order = epoch, list(self.used)
            random.Random(f"0/{epoch}").shuffle(self.order)
        return self.find(f"{self.stem}/{self.order[at]}")

    def find(self, id: str) -> Problem:
        """The problem of an id: NAME/ROW."""
        row = self.row(id)
        prompt = self.style.ask(row["prompt"])
        return Problem(id, prompt, row["answer"], row["row"], self.style.chat)

    def row(self, id: str) -> dict:
        return self.rows[int(id.rsplit("/", 1)[1])]

    def ids(self, index: int) -> list[str]:
        """The ids of the problems that are dropped together."""
        return [f"{self.stem}/{index}"]

    def rewards(self, answers: list[Answer], known=None) -> tuple[list[float], Counter]:
        """The reward of each answer, and counts (rewards.Reward.of)."""
        return self.reward.of(answers, known)

    def fit(self, tokenizer, limit: int = 0) -> int:
        """Drop rows with prompts of more than `limit` tokens (0: keep all); returns the length of
        the longest remaining prompt. Raises UserError if no row remains."""
        problems = [self.find(id) for i in range(self.total) for id in self.ids(i)]
        self.read_template(tokenizer, problems[0])
        each = [len(ids) for ids in encode_all(tokenizer, problems)]
        n = len(each) // self.total
        lengths = [max(each[i : i + n]) for i in range(0, len(each), n)]
        self.used = [i for i, n in enumerate(lengths) if not limit or n <= limit]
        self.dropped, self.epoch = len(lengths) - len(self.used), -1
        need(
            self.used,
            f"--max_prompt_tokens={limit}: every prompt of {self.name} is longer; the shortest prompt has "
            f"{min(lengths)} tokens",
        )
        return max(lengths[i] for i in self.used)

    def read_template(self, tokenizer, problem: Problem) -> None:
        """Tell the reward if prompts end with <think>, as some chat templates write it."""
        prompt, _ = render(tokenizer, problem)
        opened = prompt.rstrip().endswith("<think>")
        self.reward = dataclasses.replace(self.reward, opened=opened)


class OwnTask(Table):
    """A Table over a class in a user's file, which makes rows on request; both splits have the
    order of indices.

    The class has `problem(split, index)`, which returns a row; `size`, the number of problems or
    None (endless); and, unless --reward is set, `reward(row, text, finish_reason)`."""

    def __init__(
        self, name: str, style: Style, reward, columns: tuple[str, str] = ("", "")
    ):
        super().__init__(name, [], style, reward)
        # needed: every row has an answer
        self.columns, self.needed = columns, reward.needs_answer
        path, _, attribute = name.rpartition(":")
        try:
            self.made = attribute_of(path, attribute)()
        except Exception as e:  # the file is the user's
            why = f"cannot be loaded ({described(e)}); fix the file"
            raise UserError(f"--task={name}: {why}") from None
        need(
            callable(getattr(self.made, "problem", None))
            and hasattr(self.made, "size"),
            f"--task={name}: needs a method problem(split, index) and an attribute size (None: endless)",
        )
        self.total = self.made.size or 0
        # for both splits; empty for an endless class
        self.used = list(range(self.total))
        if callable(getattr(self.made, "reply", None)):
            self.environment = f"{name}.reply"
        self.tokenizer, self.limit = None, 0  # of an endless class's prompts

    def digest(self) -> str:
        """SHA-256 of the first 64 training problems."""
        rows = [
            self.row(f"{self.stem}/train/{i}") for i in range(min(self.total or 64, 64))
        ]
        made = [(row["prompt"], row["answer"]) for row in rows]
        return hashlib.sha256(repr(made).encode(errors="replace")).hexdigest()

    def problem(self, split: str, index: int) -> Problem:
        number = self.used[index % len(self.used)] if self.used else index
        problem = self.find(f"{self.stem}/{split}/{number}")
        if self.limit:
            n = len(encode(self.tokenizer, problem))
            need(
                n <= self.limit,
                f"{problem.id}: a prompt of {n} tokens, more than --max_prompt_tokens={self.limit}; shorten it",
            )
        return problem

    def row(self, id: str) -> dict:
        _, split, index = id.rsplit("/", 2)
        try:
            made = self.made.problem(split, int(index))
        except Exception as e:
            why = f"problem({split!r}, {index}) raised {described(e)}"
            raise UserError(f"--task={self.name}: {why}") from None
        place = f"{self.name}, {split} problem {index}"
        return read_row(made, place, *self.columns, self.needed)

    def ids(self, index: int) -> list[str]:
        return [f"{self.stem}/{split}/{index}" for split in ("train", "test")]

    def fit(self, tokenizer, limit: int = 0) -> int:
        """`Table.fit`, by the longer of a problem's prompts in the two splits. For an endless class
        it returns the limit, and a longer prompt raises UserError when it is drawn."""
        if self.used:
            return super().fit(tokenizer, limit)
        need(
            limit,
            f"--max_prompt_tokens: {self.name} is endless, so the length of its longest prompt is not "
            "known; give --max_prompt_tokens",
        )
        self.read_template(tokenizer, self.problem("train", 0))
        self.tokenizer, self.limit = tokenizer, limit
        return limit


def digest_of(name: str) -> str:
    """SHA-256 of a task's file, so that hosts can compare their files, or of a data set's name; ""
    for arith."""
    if name == "arith":
        return ""
    parts = mixed(name)
    if len(parts) > 1:
        return hashlib.sha256("".join(map(digest_of, parts)).encode()).hexdigest()
    file = file_of(name)
    return hashlib.sha256(
        Path(file).read_bytes() if file else name.encode()
    ).hexdigest()


def file_of(name: str) -> str:
    """The file of a task, or of its class; "" for arith and for a data set."""
    if name == "arith" or name.startswith("hf:"):
        return ""
    return name.rpartition(":")[0] if is_own(name) else name


def is_own(name: str) -> bool:
    """Whether a task is a class in a user's file, FILE.py:CLASS."""
    return ".py:" in name


def label_of(name: str) -> str:
    """A task's short name for problems and metrics: the name of its file, data set or class."""
    if name.startswith("hf:") and len(mixed(name)) == 1:
        data_set = name.removeprefix("hf:").rpartition("/")[0]
        return data_set.rpartition("/")[2].partition("@")[0]
    if is_own(name):
        return name.rpartition(":")[2]
    if len(mixed(name)) > 1:
        return "+".join(map(label_of, mixed(name)))
    return Path(name.removesuffix(".gz")).stem


def named_columns(text: str, kinds) -> dict[str, str]:
    """Kind -> column, from the value of --columns: KIND=NAME with commas. UserError: one
    sentence."""
    pairs = [part.strip().partition("=") for part in text.split(",") if part]
    for kind, _, name in pairs:
        need(
            kind in kinds and name,
            f"--columns={text}: write KIND=NAME, separated by commas; each KIND is one of {', '.join(kinds)}",
        )
    return {kind: name for kind, _, name in pairs}


def read_rows(
    name: str,
    flag: str = "task",
    columns: tuple[str, str] = ("", ""),
    needed: bool = True,
) -> list[dict]:
    """Rows {prompt, answer, row} of a file or data set. Raises UserError, which names file and
    line.

    flag: the flag that names it. needed: a row without an answer is an error; else its answer is
    "". Columns named by --columns but missing from a set of --eval_task are replaced by the default
    names."""
    raw = []
    for part in mixed(name):
        raw += from_hub(part, flag) if part.startswith("hf:") else from_file(part, flag)
    if flag == "eval_task" and raw and isinstance(raw[0][1], dict):
        columns = [key if nested(raw[0][1], key) is not None else "" for key in columns]
    rows = [read_row(row, place, *columns, needed) for place, row in raw]
    need(rows, f"{name}: no problems in the file; {NEEDS}")
    return rows


def mixed(name: str) -> list[str]:
    """The files and data sets of a task: a.jsonl,b.jsonl is one task with the rows of both."""
    if "," not in name or Path(name).exists() or is_own(name):
        return [name]
    return [part.strip() for part in name.split(",") if part.strip()]


def from_file(name: str, flag: str) -> list[tuple[str, object]]:
    """(place, row) pairs of a JSONL, JSON or Parquet file."""
    path = Path(name)
    if not path.is_file():
        problem = "a folder" if path.is_dir() else "no such file"
        also = "`arith` or " if flag == "task" else ""
        raise UserError(
            f"--{flag}={name}: {problem}; give {also}the path of a JSONL, JSON or Parquet file, or hf:NAME/SPLIT"
        )
    kind = path.suffix.lower()
    need(kind != ".gz", f"--{flag}={name}: a packed file; unpack it with gunzip")
    if kind == ".parquet":
        from pyarrow import parquet

        try:
            return placed(name, parquet.read_table(path).to_pylist())
        except (OSError, ValueError) as e:  # ArrowInvalid is a ValueError
            why = f"not a complete Parquet file ({shortened(e)}); copy it again"
            raise UserError(f"{name}: {why}") from None
    text = read_text(path)
    if kind == ".json":
        rows = parsed(text, name, "fix this place in the array")
        need(
            isinstance(rows, list),
            f"{name}: not a JSON array of rows; the name of a file with one row per line must end in .jsonl",
        )
        return placed(name, rows)
    lines = text.split("\n")  # not splitlines(), which splits at more characters
    places = {
        f"{name}, line {n}": line for n, line in enumerate(lines, 1) if line.strip()
    }
    return [(place, parsed(line, place)) for place, line in places.items()]


def from_hub(name: str, flag: str) -> list[tuple[str, object]]:
    """(place, row) pairs of hf:NAME/SPLIT or hf:NAME@CONFIG/SPLIT, read by the datasets library.
    NAME may be a folder."""
    import datasets

    source, slash, split = name.removeprefix("hf:").rpartition("/")
    need(
        slash and source and split,
        f"--{flag}={name}: write hf:NAME/SPLIT, such as hf:openai/gsm8k@main/train",
    )
    source, _, config = source.partition("@")
    try:
        dataset = datasets.load_dataset(source, config or None, split=split)
    except Exception as e:  # the library raises many types
        raise UserError(
            f"--{flag}={name}: cannot be loaded ({shortened(e)}); write hf:NAME/SPLIT or hf:NAME@CONFIG/SPLIT, and "
            "check the connection"
        ) from None
    return placed(name, list(dataset))


def placed(name: str, rows: list) -> list[tuple[str, object]]:
    return [(f"{name}, row {n}", row) for n, row in enumerate(rows, 1)]


def parsed(
    text: str, place: str, fix: str = "fix or remove that line, one object a line"
):
    """Parsed JSON. Raises UserError, which names the place, the line number and the fix."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:  # also for huge numbers and deep nesting
        why = str(getattr(e, "msg", e))[:60]
        line = (
            f", line {e.lineno}"
            if hasattr(e, "lineno") and "\n" in text.strip()
            else ""
        )
        raise UserError(f"{place}{line}: not valid JSON ({why}); {fix}") from None


def read_row(row, place: str, prompt_key: str, answer_key: str, needed: bool) -> dict:
    """A row with its prompt and final answer, as {prompt, answer, row}. place: file and line, for
    the UserError."""
    need(isinstance(row, dict), f"{place}: not a JSON object; {NEEDS}")
    prompt = prompt_of(row, place, prompt_key)
    answer, listed = answer_of(row, place, answer_key, needed), choices_of(row)
    text = prompt if isinstance(prompt, str) else "".join(m["content"] for m in prompt)
    checked = {"problem": re.search(CONTROL, text)}
    if needed and not listed:
        checked[f"`answer` {answer!r:.60}"] = re.search(IN_ANSWER, answer)
    for field, damage in checked.items():
        need(
            not damage,
            f"{place}: the {field} holds a control character, as LaTeX with one backslash in JSON does; write "
            "\\\\frac, or remove that line",
        )
    answer = answer.strip()
    if listed and (answer or needed):
        prompt, answer = multiple_choice(prompt, listed, answer, row, place, answer_key)
    need(
        answer or not needed,
        f"{place}: the `answer` is empty; add one, or remove that line",
    )
    solution = row.get("answer")
    is_worked = isinstance(solution, str) and solution.strip() != answer
    worked = {"solution": solution} if is_worked else {}
    return {
        "prompt": prompt,
        "answer": answer,
        "row": {**worked, **row, **({"answer": answer} if answer else {})},
    }


def nested(row: dict, key: str):
    """The value of the nested key a.b.c; None if it is missing."""
    if key in row:
        return row[key]
    for name in key.split("."):
        row = row.get(name) if isinstance(row, dict) else None
    return row


def prompt_of(row: dict, place: str, key: str) -> str | list[dict]:
    """A row's prompt: a text, or messages. Raises UserError if the row has no prompt."""
    for name in [key] if key else PROMPTS:
        value = nested(row, name)
        if isinstance(value, str) and value.strip():
            return value
        if (
            isinstance(value, list)
            and value
            and all(isinstance(m, dict) for m in value)
        ):
            messages = [{key: m.get(key) for key in ("role", "content")} for m in value]
            if all(isinstance(x, str) for m in messages for x in m.values()):
                return messages
    named = f"`{key}`" if key else "`problem` or `question`"
    hint = "change --columns" if key else "name the column with --columns=prompt=NAME"
    raise UserError(f"{place}: no {named} text; add one, or {hint}")


def answer_of(row: dict, place: str, key: str, needed: bool) -> str:
    """A row's final answer; "" if the column is empty, or if it is missing and not needed. Raises
    UserError if a needed column is missing."""
    answer = None
    for name in [key] if key else ANSWERS:
        value = nested(row, name)
        missing = isinstance(value, float) and math.isnan(value)  # as pandas writes it
        if (
            missing
            or isinstance(value, bool)
            or not isinstance(value, (str, int, float))
        ):
            continue
        # a worked solution without a marked answer
        if not key and name == "solution" and "\\boxed" not in str(value):
            continue
        answer = final_answer(written(value))
        if answer:
            return answer
    if answer is not None or not (needed or key):
        return ""
    named = f"`{key}`" if key else "`answer`"
    hint = "change --columns" if key else "name the column with --columns=answer=NAME"
    raise UserError(
        f"{place}: no {named} that is a text or a number; add one, or {hint}"
    )


def written(value: str | float) -> str:
    """A text, or a number in plain digits: 0.00001 and 42, not Python's 1e-05 and 42.0."""
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    return format(Decimal(repr(value)), "f").removesuffix(".0")


def final_answer(answer: str) -> str:
    """The text after #### (GSM8K), or in the last box of a worked solution (also \\boxed 2), or ""
    if the box is empty; else the whole answer. White space before a lower-case letter stays, because
    it can be a damaged LaTeX command."""
    box = last_box(answer)
    bare = re.findall(r"\\boxed\s+([^\s{]+?)(?=\.?(?:[$\s]|$))", answer)
    if "####" in answer:
        answer = answer.split("####")[-1]
    elif box:
        answer = box[len("\\boxed{") : -1]
    elif "\\boxed" in answer:
        answer = bare[-1] if bare else ""
    return re.sub(r"^\s+(?![a-z])", "", answer.rstrip())


def choices_of(row: dict) -> list[str]:
    """The choices of a row in the formats of ARC, MMLU, MMLU-Pro and GPQA; [] if it has no
    choices."""
    for name in ("choices", "options"):
        value = row.get(name)
        if isinstance(value, dict):
            value = value.get("text")
        is_list = isinstance(value, list) and len(value) > 1
        if is_list and all(type(x) in (str, int, float) for x in value):
            return [written(x).strip() for x in value]
    names = ["Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3))]
    four = [row.get(name) for name in names]
    return [x.strip() for x in four] if all(isinstance(x, str) for x in four) else []


def multiple_choice(
    prompt, listed: list[str], answer: str, row: dict, place: str, key: str
):
    """(question followed by its choices, letter of the right choice). Raises UserError if the
    answer names no choice."""
    need(
        isinstance(prompt, str) and len(listed) <= len(LETTERS),
        f"{place}: choices need a question that is a text, and there can be at most {len(LETTERS)} choices",
    )
    # GPQA lists it first: shuffle with the question as seed
    if "Correct Answer" in row:
        listed = list(listed)
        random.Random(prompt).shuffle(listed)
    labels = (
        row["choices"].get("label") if isinstance(row.get("choices"), dict) else None
    )
    at = nested(row, key) if key else row.get("answer")
    if key in ("", "answer"):
        at = row.get("answer_index", at)
    # MMLU and MMLU-Pro count from 0
    if type(at) is not int or not 0 <= at < len(listed):
        pairs = [(listed, answer), (list(LETTERS[: len(listed)]), answer.upper())]
        if labels and answer in labels:  # ARC: A to E, or 1 to 5
            pairs = [(labels, answer)]
        indices = {names.index(x) for names, x in pairs if x in names}
        need(
            len(indices) == 1,
            f"{place}: the `{key or 'answer'}` is {answer}, which does not name exactly one of the {len(listed)} "
            "choices; give its number from 0 as `answer_index`",
        )
        (at,) = indices
    lines = [f"{letter}. {text}" for letter, text in zip(LETTERS, listed, strict=False)]
    return "\n".join([prompt, *lines]), LETTERS[at]
