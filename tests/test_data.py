"""Files and data sets of every layout, custom task classes, and their prompts."""

import hashlib
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import make_cfg, write_rows
from standins import CHATML
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import tasks
from machinery import run
from tasks import eval_sets, make_task
from tasks.data import Table, digest_of, final_answer, read_rows
from tasks.prompts import TEMPLATES, Answer, Chat, Problem, Style, encode, encode_all
from tasks.rewards import Reward

DEFAULTS = {"samples": 4, "temperature": 1.0, "max_tokens": 32}  # of a held-out set


@pytest.fixture(scope="module")
def bytes_tokenizer():
    """One token for each byte, the special tokens of a chat, and a mark before every plain text."""
    names = ["<mark>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tok = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens(names)
    mark = [("<mark>", tok.token_to_id("<mark>"))]
    tok.post_processor = processors.TemplateProcessing(single="<mark> $A", special_tokens=mark)
    return PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|im_end|>", pad_token="<|endoftext|>")


@pytest.fixture
def tokenizer(bytes_tokenizer):
    bytes_tokenizer.chat_template = CHATML
    return bytes_tokenizer


def cfg_of(**changes):
    """Flags of a run, unchecked, without a model."""
    return replace(make_cfg(), **changes)


def write(path, content) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


def rows_of(path, **keys) -> list[tuple]:
    return [(row["prompt"], row["answer"]) for row in read_rows(str(path), **keys)]


# -- Rows --------------------------------------------------------------------------------------------------------------


def test_a_number_is_written_in_digits(tmp_path):
    for value, wanted in ((1e-05, "0.00001"), (1e22, "1" + 22 * "0"), (42.0, "42"), (-2.5, "-2.5"), ("4.0", "4.0")):
        assert rows_of(write(tmp_path / "x.jsonl", {"question": "?", "answer": value})) == [("?", wanted)]


def test_changed_files_are_refused_at_a_resume(tmp_path, monkeypatch):
    """A changed file is named, for every flag that reads it; an unchanged file passes. Ranks have the same problems."""
    data = write(tmp_path / "x,y.jsonl", {"question": "1?", "answer": "1"})
    system = write(tmp_path / "system.txt", "Be brief.")
    reward = write(tmp_path / "mine.py", "def score(answer):\n    return 1.0\n")
    own = write(tmp_path / "own.py", ONE.format(n="self.n") + "    n = 1\n")
    cfg = cfg_of(task=data, system_prompt=system, reward=f"{reward}:score", eval_task="", out=str(tmp_path))
    tasks.check_unchanged(cfg, None)
    write(tmp_path / "config.json", {"data": tasks.digests(cfg)})
    for file, named in ((data, data), (system, "--system_prompt"), (reward, f"{reward}:score")):
        before = Path(file).read_text(encoding="utf-8")
        write(Path(file), before + " ")
        with pytest.raises(ValueError, match=re.escape(f"--resume: {named} changed since the run began")):
            tasks.check_unchanged(cfg, None)
        write(Path(file), before)
    tasks.check_unchanged(cfg, None)
    cfg = cfg_of(task=f"{own}:T", eval_task="", out=str(tmp_path))
    task = make_task(cfg)
    write(tmp_path / "config.json", {"data": tasks.digests(cfg, task)})
    tasks.check_unchanged(cfg, task)
    task.made.n = 2  # other problems of the same class
    with pytest.raises(ValueError, match="--resume: the problems of .*own.py:T .* changed since the run began"):
        tasks.check_unchanged(cfg, task)
    monkeypatch.setattr(run, "from_all", lambda x: [x, "of another rank"])
    with pytest.raises(ValueError, match="own.py:T: the same number gives different problems; let"):
        run.open_run(cfg, None)
    monkeypatch.setattr(run, "from_all", lambda x: [x])
    write(Path(own), ONE.format(n="next(COUNT)") + "import itertools\nCOUNT = itertools.count()\n")
    with pytest.raises(ValueError, match="own.py:T: the same number gives different problems"):
        run.open_run(cfg, None)


BOARDS = """
import numpy as np

class Board:
    def __init__(self, n):
        self.cells = np.full((40, 40), n)

class T:
    size = 2

    def problem(self, split, index):
        return {"prompt": "p", "answer": "a", "board": VALUE}

    def reward(self, row, text, finish_reason):
        return float(row["board"].cells.sum())
"""


def test_rows_reach_a_reward_whole(tmp_path):
    """Arrays that differ, of a class in the user's file; a function in a row is refused before a model loads."""
    own = write(tmp_path / "boards.py", BOARDS.replace("VALUE", "Board(index)"))
    task = make_task(cfg_of(task=f"{own}:T", eval_task=""))
    assert task.rewards([Answer(task.problem("train", i), "x", True) for i in (0, 1)])[0] == [0.0, 1600.0]
    own = write(tmp_path / "functions.py", BOARDS.replace("VALUE", "lambda: 0"))
    with pytest.raises(ValueError, match="functions.py:T.reward .*keep functions out of rows"):
        make_task(cfg_of(task=f"{own}:T", eval_task=""))


CHAT = [{"role": "system", "content": "Think."}, {"role": "user", "content": "1+1?"}]
MC = {"question": "q", "choices": ["u", "v"]}
LETTERS = {"question": "q", "options": ["C", "B", "A"]}
LAYOUTS = {
    "MATH": ({"problem": "p", "solution": "so \\boxed{\\frac12}.", "level": 3}, ("p", "\\frac12")),
    "MATH-500": ({"problem": "p", "solution": "s \\boxed{7}", "answer": "8"}, ("p", "8")),
    "GSM8K": ({"question": "q", "answer": "1 + 1 = 2\n#### 1,200"}, ("q", "1,200")),
    "AIME": ({"Problem": "p", "Answer": 204}, ("p", "204")),
    "DAPO": ({"prompt": CHAT, "reward_model": {"ground_truth": "34", "style": "rule"}}, (CHAT, "34")),
    "MMLU": ({"question": "q", "choices": [3, 0.0, "x"], "answer": 0}, ("q\nA. 3\nB. 0\nC. x", "A")),
    "MMLU-Pro": ({"question": "q", "options": ["u", "v"], "answer": "B", "answer_index": 1}, ("q\nA. u\nB. v", "B")),
    "ARC": ({**MC, "choices": {"text": ["u", "v"], "label": ["1", "2"]}, "answerKey": "2"}, ("q\nA. u\nB. v", "B")),
    "MMLU-Pro, of letters": ({**LETTERS, "answer": "A", "answer_index": 0}, ("q\nA. C\nB. B\nC. A", "A")),
    "by its text": ({**MC, "answer": "v"}, ("q\nA. u\nB. v", "B")),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name, tmp_path):
    """Every column is kept, with the final answer as `answer`."""
    row, (prompt, answer) = LAYOUTS[name]
    (read,) = read_rows(write(tmp_path / "x.jsonl", row))
    worked = {"solution": row["answer"]} if name == "GSM8K" else {}
    assert (read["prompt"], read["answer"]) == (prompt, answer)
    assert {**read["row"], **row, "answer": answer, **worked} == read["row"]


CHOICES = {"prompt": "p", "choices": ["w", "x", "y", "z"]}


@pytest.mark.parametrize(
    "row, key, wanted",
    [
        ({"prompt": "p", "solution": "34"}, "solution", "34"),  # unlike an unnamed solution, it needs no box
        ({**CHOICES, "answer": 3, "gold": "w"}, "gold", "A"),
        ({**CHOICES, "label": 2}, "label", "C"),
        ({"prompt": "p", "meta": {"gold": 5}, "answer": "6"}, "meta.gold", "5"),
        ({"prompt": "p", "a.b": "c", "answer": "6"}, "a.b", "c"),
        ({"prompt": "p", "choices": ["B", "A"], "answer": "A", "answer_index": 1}, "answer", "B"),
    ],
)
def test_a_named_column_is_the_answer(row, key, wanted, tmp_path):
    ((_, answer),) = rows_of(write(tmp_path / "x.jsonl", row), columns=("", key))
    assert answer == wanted


def test_gpqa_shuffles_its_choices(tmp_path):
    """The order depends only on the question: the right answer is not always first, and its position is fixed."""
    wrong = {f"Incorrect Answer {k}": f"wrong {k}\n" for k in (1, 2, 3)}
    rows = [{"Question": f"q{i}", "Correct Answer": "right \n", **wrong} for i in range(60)]  # the format of the hub
    path = write(tmp_path / "gpqa.json", rows)
    letters = Counter()
    for prompt, letter in rows_of(path):
        assert f"{letter}. right" in prompt.splitlines()
        assert sorted(line[3:] for line in prompt.splitlines()[1:]) == ["right", "wrong 1", "wrong 2", "wrong 3"]
        letters[letter] += 1
    assert set(letters) == set("ABCD") and rows_of(path) == rows_of(path)


def test_the_same_rows_in_every_format(tmp_path):
    import pyarrow
    from pyarrow import parquet

    rows = [{"problem": f"p{i}", "answer": str(i), "tests": [i, i + 1]} for i in range(5)]
    hub, flat = tmp_path / "set", tmp_path / "x.parquet"
    hub.mkdir()
    for path in (flat, hub / "train.parquet"):
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    wanted = [{"prompt": row["problem"], "answer": row["answer"], "row": row} for row in rows]
    for name in (write_rows(tmp_path / "x.jsonl", rows), write(tmp_path / "x.json", rows), flat, f"hf:{hub}/train"):
        assert read_rows(str(name)) == wanted
    with pytest.raises(ValueError, match=r"hf:.*/nosuch: cannot be loaded .*; write hf:NAME/SPLIT"):
        read_rows(f"hf:{hub}/nosuch")


def test_lines_end_only_at_newlines(tmp_path):
    """Python splits lines at more characters than JSONL; files from Windows start with a byte order mark."""
    text = '\ufeff{"problem": "a\u2028b\x85c", "answer": 1.5}\r\n{"problem": "p", "answer": "0"}\n'
    assert rows_of(write(tmp_path / "x.jsonl", text)) == [("a\u2028b\x85c", "1.5"), ("p", "0")]


@pytest.mark.parametrize(
    "row, sentence",
    [
        ({"prompt": [{"role": "user"}], "answer": "1"}, "no `problem` or `question` text"),
        ({"problem": "p", "answer": "2 + 3 = 5 #### "}, "the `answer` is empty"),
        ('{"problem": "p", "answer": NaN}', "no `answer` that is a text or a number"),
        ({**MC, "answer": "C"}, "the `answer` is C, which does not name exactly one of the 2"),
        ({**LETTERS, "answer": "A"}, "the `answer` is A, which does not name exactly one of the 3"),
        ({"prompt": CHAT, "choices": ["u", "v"], "answer": "A"}, "choices need a question that is a text"),
    ],
)
def test_invalid_rows_are_refused(tmp_path, row, sentence):
    """test_bad_input.py has more."""
    with pytest.raises(ValueError, match=f"x.jsonl, line 1: .*{sentence}"):
        read_rows(write(tmp_path / "x.jsonl", row))


# -- Prompts -----------------------------------------------------------------------------------------------------------


def prompt_of(tokenizer, prompt, **flags) -> str:
    """The prompt that the model sees, with the flags of a run."""
    style = Style.of(cfg_of(task="x.jsonl", **flags), "boxed")
    return tokenizer.decode(encode(tokenizer, Problem("x/0", style.ask(prompt), "1", {}, style.chat)))


BOXED = TEMPLATES["boxed"].replace("{problem}", "1+1?")
USER = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
SYSTEM = "<|im_start|>system\nBe brief.<|im_end|>\n"
NO_THINKING = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    "flags, wanted",
    [
        ({}, USER.format(BOXED)),
        ({"system_prompt": "s.txt"}, SYSTEM + USER.format(BOXED)),
        ({"chat_kwargs": "enable_thinking=false"}, USER.format(BOXED) + NO_THINKING),
        ({"chat_template": "off"}, f"<mark>{BOXED}"),
        ({"chat_template": "off", "system_prompt": "S", "prompt_template": "plain"}, "<mark>S\n\n1+1?"),
        ({"prompt_template": "t.txt"}, USER.format("Solve 1+1? now.")),
        ({"prompt_template": "plain", "chat_template": "t.jinja"}, "1+1?<|im_end|>"),
    ],
)
def test_a_problem_goes_through_every_stage(tokenizer, tmp_path, monkeypatch, flags, wanted):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "s.txt", "Be brief.\n")
    write(tmp_path / "t.txt", "Solve {problem} now.\n")
    write(tmp_path / "t.jinja", "{{ messages[-1].content }}{{ eos_token }}")
    assert prompt_of(tokenizer, "1+1?", **flags) == wanted


def test_messages_and_instructions_are_not_changed(tokenizer):
    """A template or a system prompt changes messages; an existing system message and an instruction stay."""
    chat = "<|im_start|>system\nThink.<|im_end|>\n" + USER
    assert prompt_of(tokenizer, CHAT) == prompt_of(tokenizer, CHAT, system_prompt="Other.") == chat.format("1+1?")
    assert prompt_of(tokenizer, CHAT, prompt_template="Now {problem}") == chat.format("Now 1+1?")
    assert prompt_of(tokenizer, CHAT[1:], system_prompt="Think.") == chat.format("1+1?")
    assert CHAT[1]["content"] == "1+1?"
    assert prompt_of(tokenizer, "Put x in \\boxed{}.", chat_template="off") == "<mark>Put x in \\boxed{}."
    assert "####" in Style.of(cfg_of(), "hashes").ask("Put x in \\boxed{}.")  # a different instruction


def test_prompts_equal_those_of_transformers(tokenizer):
    """Also for several prompts at once, and for tokenizers without a template."""
    chats = [CHAT[:n] for n in (1, 2)] + [[{"role": "user", "content": "p" * n}] for n in (1, 2, 3)]
    problems = [Problem("m", chat, "1") for chat in chats] + [Problem("p", "p", "1")]
    rows = encode_all(tokenizer, problems)
    for ids, problem, messages in zip(rows, problems, [*chats, chats[2]], strict=True):
        wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert ids == wanted == encode(tokenizer, problem)
    assert encode(tokenizer, Problem("o", "plain", "1", {}, Chat(template=""))) == tokenizer.encode("plain")
    tokenizer.chat_template = None
    assert encode(tokenizer, problems[-1]) == tokenizer.encode("p")


def test_a_prompt_that_the_chat_template_rejects(tokenizer):
    with pytest.raises(ValueError, match="x/0: the chat template rejects this prompt .no.; check"):
        prompt_of(tokenizer, "p", chat_template="{{ raise_exception('no') }}")


# -- Tables ------------------------------------------------------------------------------------------------------------


def test_named_columns_of_tasks(tmp_path):
    """Held-out sets without the columns have default columns; a training file and a class must have the columns."""
    row = {"text": "mine?", "gold": "1", "answer": "9"}
    mine = write(tmp_path / "mine.jsonl", row)
    other = write(tmp_path / "other.jsonl", {"problem": "other?", "answer": "2"})
    own = write(tmp_path / "own.py", f"class T:\n    size = 1\n    problem = lambda self, split, index: {row}\n")
    cfg = cfg_of(task=mine, columns="prompt=text, answer=gold", eval_task=f"{mine},{other}", reward="math")
    problems = [one.task.problem("test", 0) for one in eval_sets(cfg, "eval_task", DEFAULTS)]
    assert [(p.prompt.partition("\n")[0], p.answer) for p in problems] == [("mine?", "1"), ("other?", "2")]
    assert make_task(replace(cfg, task=f"{own}:T")).problem("train", 0).answer == "1"
    with pytest.raises(ValueError, match="other.jsonl, line 1: no `text` text; add one"):
        make_task(replace(cfg, task=other))


def test_the_box_of_a_worked_solution():
    boxes = {"so $x$ is $\\boxed 2$.": "2", "it is \\boxed 3.5.": "3.5", "\\boxed{1} or \\boxed{}": ""}
    assert {solution: final_answer(solution) for solution in boxes} == boxes


def test_long_prompts_are_dropped_and_counted(tokenizer, tmp_path):
    path = write_rows(tmp_path / "x.jsonl", [{"problem": "p" * n, "answer": str(n)} for n in (3, 40, 5, 60, 7)])
    task = Table(path, read_rows(path), Style(template="{problem}", chat=Chat(template="")), Reward())
    assert task.fit(tokenizer) == 61 and (task.size, task.dropped) == (5, 0)  # the mark counts
    assert task.fit(tokenizer, 41) == 41 and (task.size, task.dropped) == (4, 1)
    assert task.fit(tokenizer, 40) == 8 and (task.size, task.dropped) == (3, 2)
    assert [task.problem("test", i).answer for i in range(4)] == ["3", "5", "7", "3"]
    drawn = [task.problem("train", 3 + i) for i in range(3)]
    assert sorted(p.answer for p in drawn) == ["3", "5", "7"] and all(task.find(p.id) == p for p in drawn)


def test_one_shuffle_an_epoch(tmp_path):
    task = make_task(cfg_of(task=write(tmp_path / "x.json", [{"problem": "p", "answer": i} for i in range(50)])))
    drawn = [task.problem("train", i).answer for i in range(100)]
    assert sorted(drawn[:50]) == sorted(drawn[50:]) and drawn[:50] != drawn[50:]
    assert [task.problem("train", i).answer for i in (3, 60, 3)] == [drawn[3], drawn[60], drawn[3]]
    assert [task.problem("test", i).id for i in range(50)] == [f"x/{i}" for i in range(50)]


OWN = """
import helper

class Double:
    size = None

    def problem(self, split, index):
        return {"prompt": f"{split} 2 * {index}", "answer": 2 * index, "n": index}

    def reward(self, row, text, finish_reason):
        return {"right": helper.right(row, text), "ended": 0.25 * (finish_reason == "stop")}

class Long(Double):
    size = 3

    def problem(self, split, index):
        return {"prompt": "p" * (10 * index + 5 * (split == "test") or 1), "answer": index, "n": 0}

class Endless(Long):
    size = None

class Broken(Double):
    problem = lambda self, split, index: {"prompt": "p", "answer": 1 / index}
"""


@pytest.fixture
def own(tmp_path):
    """The path of a file with task classes, next to a module that it imports."""
    write(tmp_path / "helper.py", "right = lambda row, text: float(text == str(2 * row['n']))\n")
    return write(tmp_path / "own.py", OWN)


def test_a_custom_class(tokenizer, own):
    """Its file can import its neighbours; it grades its answers, with named parts."""
    task = make_task(cfg_of(task=f"{own}:Double", max_prompt_tokens=99))
    assert task.size is None and task.fit(tokenizer, 99) == 99
    p = task.problem("train", 7)
    assert (p.prompt, p.answer, p.id) == ("train 2 * 7", "14", "Double/train/7")
    assert task.find(p.id) == p
    rewards, counts = task.rewards([Answer(p, "14", True), Answer(p, "14", False), Answer(p, "15", True)])
    assert rewards == [1.25, 1.0, 0.25]
    assert counts == Counter({"answers": 3, "reward/Double.reward/right": 2, "reward/Double.reward/ended": 0.5})
    few = make_task(cfg_of(task=f"{own}:Long"))
    assert [few.problem("test", i).id for i in (0, 4)] == ["Long/test/0", "Long/test/1"]
    with pytest.raises(ValueError, match="--max_prompt_tokens: .*:Double is endless"):
        task.fit(tokenizer)
    with pytest.raises(ValueError, match="raised ZeroDivisionError: division by zero .own.py, line [0-9]+."):
        make_task(cfg_of(task=f"{own}:Broken"))


def test_long_prompts_of_a_custom_class(tokenizer, own):
    """They are dropped in both splits of a finite class; in an endless class they are an error."""
    task = make_task(cfg_of(task=f"{own}:Long", prompt_template="{problem}", chat_template="off"))
    assert task.fit(tokenizer) == 26 and (task.size, task.dropped) == (3, 0)  # one token each, and the mark
    assert task.fit(tokenizer, 25) == 16 and (task.size, task.dropped) == (2, 1)
    assert [task.problem("train", i).id for i in range(3)] == ["Long/train/0", "Long/train/1", "Long/train/0"]
    assert task.fit(tokenizer, 15) == 6 and (task.size, task.dropped) == (1, 2)  # only its test prompt is too long
    endless = make_task(cfg_of(task=f"{own}:Endless", prompt_template="{problem}", chat_template="off"))
    assert endless.fit(tokenizer, 15) == 15
    assert endless.problem("train", 1).answer == "1"
    with pytest.raises(ValueError, match="Endless/test/1: a prompt of 16 tokens, more than --max_prompt_tokens=15"):
        endless.problem("test", 1)


def test_digests_identify_the_same_task_on_two_hosts(own):
    assert digest_of(own) == digest_of(f"{own}:Double") == hashlib.sha256(OWN.encode()).hexdigest()
    assert digest_of("arith") == "" and digest_of("hf:a/train") != digest_of("hf:a/test")


ONE = """
class T:
    size = 1

    def problem(self, split, index):
        return {{"prompt": "p", "answer": {n}}}

    def reward(self, row, text, finish_reason):
        return {n}
"""


def test_a_custom_reward_needs_no_answer(tmp_path):
    """It can grade by a column of tests. A part that grades by the answer needs the answer."""
    rows = [{"problem": "p", "tests": "1"}, {"problem": "q", "tests": "2", "answer": "", "choices": ["u", "v"]}]
    task = write(tmp_path / "x.json", rows)
    score = write(tmp_path / "own.py", "score = lambda row, text, reason: float(text == row['tests'])\n") + ":score"
    own_task = make_task(cfg_of(task=task, reward=score))
    problems = [own_task.problem("test", i) for i in range(2)]
    assert [(p.answer, p.prompt.partition("\n")[0]) for p in problems] == [("", "p"), ("", "q")]
    assert own_task.rewards([Answer(p, "2", True) for p in problems])[0] == [0.0, 1.0]
    for flags in ({"reward": f"{score},math*0.5"}, {}, {"reward": score, "columns": "answer=gold"}):
        with pytest.raises(ValueError, match="x.json, row 1: no `.*` that is a text or a number"):
            make_task(cfg_of(task=task, **flags))
    unanswered = write(tmp_path / "two.py", ONE.format(n=3).replace('"answer": 3', '"n": 4')) + ":T"
    assert make_task(cfg_of(task=unanswered)).problem("train", 0).answer == ""
    with pytest.raises(ValueError, match="T, train problem 0: no `answer` that is a text or a number"):
        make_task(cfg_of(task=unanswered, reward="math"))


def test_evaluation_sets_have_separate_settings(tmp_path):
    """They grade with the first part only, unweighted and without a penalty of length."""
    a, b = (write(tmp_path / f"{name}.jsonl", {"problem": "p", "answer": "1"}) for name in "ab")
    cfg = cfg_of(task=a, reward="math*0.75,boxed*0.5", overlong=8, eval_task=f"{a}, {b}:temperature=0.6:samples=32")
    first, second = eval_sets(cfg, "eval_task", DEFAULTS)
    assert (first.label, first.samples, first.temperature, first.max_tokens) == ("a", 4, 1.0, 32)
    assert (second.label, second.samples, second.temperature, second.max_tokens) == ("b", 32, 0.6, 32)
    answer = Answer(first.task.problem("test", 0), "\\boxed{1}", True, 32)
    assert first.task.rewards([answer])[0] == [1.0] and make_task(cfg).rewards([answer])[0] == [0.25]
    with pytest.raises(ValueError, match="temperature=nan: must be a number of at least 0"):
        eval_sets(cfg_of(eval_task=f"{a}:temperature=nan"), "eval_task", DEFAULTS)


def test_the_problems_of_the_task_are_not_held_out(tmp_path, monkeypatch, capsys):
    """A copy and one shared row are found; a class makes its own splits."""
    monkeypatch.setenv("RANK", "5")  # left over from a scheduler
    a, b, c = [{"problem": name, "answer": "1"} for name in "abc"]
    train = write_rows(tmp_path / "train.jsonl", [a, b])
    own = write(tmp_path / "own.py", ONE.format(n=1)) + ":T"
    for task, held_out, shared in (
        (train, f"{train}:samples=2", 2),
        (f"{write_rows(tmp_path / 'c.jsonl', [c])},{train}", write_rows(tmp_path / "held.jsonl", [b, c]), 2),
        (train, write_rows(tmp_path / "one.jsonl", [{**b, "answer": "2"}, c]), 1),
        (train, write_rows(tmp_path / "other.jsonl", [c]), 0),
        (own, own, 0),
    ):
        cfg = cfg_of(task=task, eval_task=held_out)
        tasks.warn_if_shared(make_task(cfg), eval_sets(cfg, "eval_task", DEFAULTS))
        warning = capsys.readouterr().err
        assert (f": {shared} of its problems are in --task" in warning) if shared else not warning


def test_files_of_one_name(tmp_path):
    """Files in two folders are two modules, in this process and in the grading processes."""
    made = []
    for n in (1, 2):
        (tmp_path / str(n)).mkdir()
        made.append(make_task(cfg_of(task=write(tmp_path / str(n) / "own.py", ONE.format(n=n)) + ":T")))
    for n, task in enumerate(made, 1):
        problem = task.problem("train", 0)
        assert (problem.answer, task.rewards([Answer(problem, "x", True)])[0]) == (str(n), [n])
    assert "own" not in sys.modules
