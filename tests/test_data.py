"""Files and data sets of every layout, custom task classes, and their prompts."""

import hashlib
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import make_cfg
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import tasks
from tasks import Answer, Problem, Table, digest_of, encode, eval_sets, make_task, read_rows
from tasks.data import final_answer, label_of
from tasks.prompts import TEMPLATES, Chat, Style, encode_all, shown
from tasks.rewards import Reward

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.fixture
def tokenizer():
    """One token for each byte, the special tokens of a chat, and a mark before every plain text."""
    names = ["<mark>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tok = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens(names)
    tok.post_processor = processors.TemplateProcessing(
        single="<mark> $A", special_tokens=[("<mark>", tok.token_to_id("<mark>"))]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHATML
    return fast


def cfg_of(**changes):
    """Flags of a run, unchecked, without a model."""
    return replace(make_cfg(), **changes)


def write(path, content) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


def rows_of(path, **keys) -> list[tuple]:
    return [(row["prompt"], row["answer"]) for row in read_rows(str(path), **keys)]


# ---------------------------------------------------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value, wanted",
    [(1e-05, "0.00001"), (1e22, "1" + 22 * "0"), (42.0, "42"), (-2.5, "-2.5"), (7, "7"), ("4.0", "4.0")],
)
def test_a_number_is_written_in_digits(value, wanted, tmp_path):
    assert rows_of(write(tmp_path / "x.jsonl", {"question": "?", "answer": value})) == [("?", wanted)]


def test_choices_may_be_numbers(tmp_path):
    ((prompt, answer),) = rows_of(write(tmp_path / "x.jsonl", {"question": "2+3?", "choices": [4, 5.0], "answer": 1}))
    assert answer == "B" and "4" in prompt and "5\n" in prompt + "\n"


def test_changed_files_are_refused_at_a_resume(tmp_path):
    """A changed file is named, for every flag that reads it; an unchanged file passes."""
    data, system, reward = (tmp_path / name for name in ("x,y.jsonl", "system.txt", "mine.py"))
    write(data, {"question": "1?", "answer": "1"})
    write(system, "Be brief.")
    write(reward, "def score(answer):\n    return 1.0\n")
    cfg = cfg_of(task=str(data), system_prompt=str(system), reward=f"{reward}:score", eval_task="")
    config = tmp_path / "config.json"
    tasks.check_unchanged(cfg, config)
    write(config, {"data": tasks.digests(cfg)})
    tasks.check_unchanged(cfg, config)
    for path, named in ((data, str(data)), (system, "--system_prompt"), (reward, f"{reward}:score")):
        before = path.read_text(encoding="utf-8")
        write(path, before + " ")
        with pytest.raises(ValueError, match=re.escape(f"--resume: {named} changed since the run began")):
            tasks.check_unchanged(cfg, config)
        write(path, before)
    tasks.check_unchanged(cfg, config)


def test_a_folder_name_can_contain_an_equals_sign():
    assert tasks.parts_of("a/lr=1/x.jsonl:samples=8") == ("a/lr=1/x.jsonl", ["samples=8"])
    assert tasks.names_of("hf:a/train,b.py:C:samples=2,") == ["hf:a/train", "b.py:C"]


CHAT = [{"role": "system", "content": "Think."}, {"role": "user", "content": "1+1?"}]
LAYOUTS = {
    "MATH": ({"problem": "p", "solution": "so \\boxed{\\frac12}.", "level": 3}, ("p", "\\frac12")),
    "MATH-500": ({"problem": "p", "solution": "s \\boxed{7}", "answer": "8"}, ("p", "8")),
    "an empty answer": ({"problem": "p", "answer": "", "solution": "so \\boxed{3}"}, ("p", "3")),
    "GSM8K": ({"question": "q", "answer": "1 + 1 = 2\n#### 2"}, ("q", "2")),
    "AIME": ({"Problem": "p", "Answer": 204}, ("p", "204")),
    "DAPO": ({"prompt": CHAT, "reward_model": {"ground_truth": "34", "style": "rule"}}, (CHAT, "34")),
    "DeepScaleR": ({"problem": "p", "answer": "-\\frac{2}{3}", "solution": ""}, ("p", "-\\frac{2}{3}")),
    "MMLU": ({"question": "q", "choices": ["3", "0", "x"], "answer": 0}, ("q\nA. 3\nB. 0\nC. x", "A")),
    "MMLU-Pro": ({"question": "q", "options": ["u", "v"], "answer": "B", "answer_index": 1}, ("q\nA. u\nB. v", "B")),
    "ARC": (
        {"question": "q", "choices": {"text": ["u", "v", "w"], "label": ["1", "2", "3"]}, "answerKey": "3"},
        ("q\nA. u\nB. v\nC. w", "C"),
    ),
    "MMLU-Pro, of letters": (
        {"question": "q", "options": ["C", "B", "A"], "answer": "A", "answer_index": 0},
        ("q\nA. C\nB. B\nC. A", "A"),
    ),
    "by its text": ({"question": "q", "choices": ["u", "v"], "answer": "v"}, ("q\nA. u\nB. v", "B")),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name, tmp_path):
    row, wanted = LAYOUTS[name]
    assert rows_of(write(tmp_path / "x.jsonl", row)) == [wanted]
    (read,) = read_rows(str(tmp_path / "x.jsonl"))
    assert read["row"].pop("answer") == wanted[1]
    kept = {key: value for key, value in row.items() if key != "answer"}
    if name == "GSM8K":
        kept["solution"] = row["answer"]  # worked steps are kept
    assert {key: read["row"].get(key) for key in kept} == kept


@pytest.mark.parametrize(
    "row, key, wanted",
    [
        (
            {"prompt": "p", "solution": "34"},
            "solution",
            "34",
        ),  # a worked solution must contain its answer, a named column is the answer
        ({"prompt": "p", "choices": ["w", "x", "y", "z"], "answer": 3, "gold": "w"}, "gold", "A"),
        ({"prompt": "p", "choices": ["w", "x", "y", "z"], "answer_index": 0, "key": "C"}, "key", "C"),
        ({"prompt": "p", "choices": ["w", "x", "y", "z"], "label": 2}, "label", "C"),
        ({"prompt": "p", "choices": ["w", "x"], "answer": "x", "answer_index": 1}, "answer", "B"),
        ({"prompt": "p", "choices": ["B", "A"], "answer": "A", "answer_index": 1}, "answer", "B"),
        ({"prompt": "p", "choices": ["w", "x"], "answer": "x", "answer_index": 1, "gold": "w"}, "gold", "A"),
    ],
)
def test_a_named_column_is_the_answer(row, key, wanted, tmp_path):
    ((_, answer),) = rows_of(write(tmp_path / "x.jsonl", row), columns=("", key))
    assert answer == wanted


def test_gpqa_shuffles_its_choices(tmp_path):
    """The order depends only on the question: the right answer is not always first, and its position is fixed."""
    rows = []
    for i in range(60):
        wrong = {f"Incorrect Answer {k}": f"wrong {k}\n" for k in (1, 2, 3)}
        rows.append({"Question": f"q{i}", "Correct Answer": "right \n", **wrong})  # the format of the hub
    path = write(tmp_path / "gpqa.json", rows)
    letters = Counter()
    for prompt, letter in rows_of(path):
        assert f"{letter}. right" in prompt.splitlines()
        assert sorted(line[3:] for line in prompt.splitlines()[1:]) == ["right", "wrong 1", "wrong 2", "wrong 3"]
        letters[letter] += 1
    assert set(letters) == set("ABCD") and rows_of(path) == rows_of(path)


def test_columns_by_name(tmp_path):
    row = {"problem": "no", "text": {"en": "yes"}, "meta": {"gold": 5}, "a.b": "c", "answer": "6"}
    path = write(tmp_path / "x.jsonl", row)
    assert rows_of(path, columns=("text.en", "meta.gold")) == [("yes", "5")]
    assert rows_of(path, columns=("a.b", "")) == [("c", "6")]
    with pytest.raises(ValueError, match="line 1: no `text.de` text; add one"):
        rows_of(path, columns=("text.de", ""))
    with pytest.raises(ValueError, match="line 1: no `meta` that is a text or a number; add one"):
        rows_of(path, columns=("", "meta"))


def test_the_same_rows_in_every_format(tmp_path):
    import pyarrow
    from pyarrow import parquet

    rows = [{"problem": f"p{i}", "answer": str(i), "tests": [i, i + 1]} for i in range(5)]
    write(tmp_path / "x.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write(tmp_path / "x.json", rows)
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    hub = tmp_path / "set"
    hub.mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(rows), hub / "train.parquet")
    wanted = [{"prompt": row["problem"], "answer": row["answer"], "row": row} for row in rows]
    for name in (tmp_path / "x.jsonl", tmp_path / "x.json", tmp_path / "x.parquet", f"hf:{hub}/train"):
        assert read_rows(str(name)) == wanted
    with pytest.raises(ValueError, match=r"hf:.*/nosuch: cannot be loaded .*; write hf:NAME/SPLIT"):
        read_rows(f"hf:{hub}/nosuch")
    with pytest.raises(ValueError, match="--task=hf:gsm8k: write hf:NAME/SPLIT, such as hf:openai/gsm8k@main/train"):
        read_rows("hf:gsm8k")
    (tmp_path / "x.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(ValueError, match="x.parquet: not a complete Parquet file .*; copy it again"):
        read_rows(str(tmp_path / "x.parquet"))


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    write(tmp_path / "x.parquet", "")
    with pytest.raises(
        ValueError, match="the package pyarrow, which reads this file, is not installed; pip install pyarrow"
    ):
        read_rows(str(tmp_path / "x.parquet"))
    with pytest.raises(
        ValueError, match="the package datasets, which reads this file, is not installed; pip install datasets"
    ):
        read_rows("hf:a/b")


@pytest.mark.parametrize(
    "row, sentence",
    [
        ({"prompt": [{"role": "user"}], "answer": "1"}, "line 1: no `problem` or `question` text"),
        ({"prompt": [], "answer": "1"}, "line 1: no `problem` or `question` text"),
        ({"problem": "p", "solution": "no box"}, "line 1: no `answer` that is a text or a number"),
        (
            {"question": "q", "choices": ["u", "v"], "answer": "C"},
            "line 1: the `answer` is C, which does not name any of the 2",
        ),
        (
            {"question": "q", "choices": ["u", "v"], "answer": 2},
            "line 1: the `answer` is 2, which does not name any of the 2",
        ),
        (
            {"question": "q", "choices": ["C", "B", "A"], "answer": "A"},
            "line 1: the `answer` is A, the text of one choice and the letter of a different choice",
        ),
        ({"prompt": CHAT, "choices": ["u", "v"], "answer": "A"}, "line 1: choices need a question that is a text"),
    ],
)
def test_invalid_rows_are_refused(tmp_path, row, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_rows(write(tmp_path / "x.jsonl", row))
    with pytest.raises(
        ValueError,
        match="x.json: not a JSON array of rows; the name of a file with one row per line must end in .jsonl",
    ):
        read_rows(write(tmp_path / "x.json", row))


# ---------------------------------------------------------------------------------------------------------------------
# Prompts
# ---------------------------------------------------------------------------------------------------------------------


def prompt_of(tokenizer, prompt, answer="1", **flags) -> str:
    """The prompt that the model sees, with the flags of a run."""
    cfg = cfg_of(task="x.jsonl", **flags)
    problem = Problem("x/0", Style.of(cfg, "boxed").ask(prompt), answer, {}, Style.of(cfg, "boxed").chat)
    return tokenizer.decode(encode(tokenizer, problem))


def test_a_problem_goes_through_every_stage(tokenizer, tmp_path):
    boxed = TEMPLATES["boxed"].replace("{problem}", "1+1?")
    user = f"<|im_start|>user\n{boxed}<|im_end|>\n<|im_start|>assistant\n"
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert prompt_of(tokenizer, "1+1?") == user
    assert prompt_of(tokenizer, "1+1?", system_prompt="Be brief.") == system + user
    assert prompt_of(tokenizer, "1+1?", system_prompt=write(tmp_path / "s.txt", "Be brief.\n")) == system + user
    for no in ("false", "False"):
        assert prompt_of(tokenizer, "1+1?", chat_kwargs=f"enable_thinking={no}") == user + "<think>\n\n</think>\n\n"
    assert prompt_of(tokenizer, "1+1?", chat_kwargs="enable_thinking=True") == user
    assert prompt_of(tokenizer, "1+1?", chat_template="off") == f"<mark>{boxed}"
    assert (
        prompt_of(tokenizer, "1+1?", chat_template="off", system_prompt="S", prompt_template="plain")
        == "<mark>S\n\n1+1?"
    )
    assert "<|im_start|>user\nQ: 1+1?\nA:<|im_end|>" in prompt_of(tokenizer, "1+1?", prompt_template="Q: {problem}\nA:")
    template = write(tmp_path / "t.txt", "Solve {problem} now.\n")
    assert "user\nSolve 1+1? now.<|im_end|>" in prompt_of(tokenizer, "1+1?", prompt_template=template)
    template_file = write(tmp_path / "t.jinja", "{{ messages[-1].content }}{{ eos_token }}")
    assert prompt_of(tokenizer, "1+1?", prompt_template="plain", chat_template=template_file) == "1+1?<|im_end|>"


def test_messages_are_not_changed(tokenizer):
    """A template or a system prompt changes them; an existing system message stays."""
    chat = "<|im_start|>system\nThink.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_of(tokenizer, CHAT) == prompt_of(tokenizer, CHAT, system_prompt="Other.") == chat.format("1+1?")
    assert prompt_of(tokenizer, CHAT, prompt_template="Now {problem}") == chat.format("Now 1+1?")
    assert prompt_of(tokenizer, CHAT[1:], system_prompt="Think.") == chat.format("1+1?")
    assert CHAT == [{"role": "system", "content": "Think."}, {"role": "user", "content": "1+1?"}]


def test_an_instruction_in_the_problem_is_not_repeated(tokenizer):
    assert prompt_of(tokenizer, "Put x in \\boxed{}.", chat_template="off") == "<mark>Put x in \\boxed{}."


def test_prompts_equal_those_of_transformers(tokenizer):
    """Also for several prompts at once, and for tokenizers without a template."""
    problems = [Problem(str(i), "p" * i, "1") for i in range(1, 5)] + [Problem("c", CHAT, "1")]
    problems += [Problem("o", "plain", "1", {}, Chat(template=""))]
    rows = encode_all(tokenizer, problems)
    for problem, ids in zip(problems[:-1], rows, strict=False):
        messages = problem.prompt if isinstance(problem.prompt, list) else [{"role": "user", "content": problem.prompt}]
        wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert ids == wanted == encode(tokenizer, problem)
    assert rows[-1] == tokenizer.encode("plain")
    tokenizer.chat_template = None
    assert encode(tokenizer, problems[0]) == tokenizer.encode("p")


def test_show_prompt_shows_every_token(tokenizer):
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    page = shown(tokenizer, [Problem("x/0", " two  spaces .", "7")], ends).splitlines()
    assert page[0] == f"--- x/0: {len(encode(tokenizer, Problem('x/0', ' two  spaces .', '7')))} tokens, answer 7"
    assert page[1:4] == ["<|im_start|>user", " two  spaces .<|im_end|>", "<|im_start|>assistant"]
    assert page[-1] == f"--- a response ends with <|im_end|> ({ends[0]}) or <|endoftext|> ({ends[1]})"


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ({"prompt_template": "Q:"}, "--prompt_template=Q:: must contain .problem. exactly once"),
        ({"prompt_template": "{problem}{problem}"}, "must contain .problem. exactly once"),
        ({"chat_template": "none.jinja"}, "--chat_template=none.jinja: no such file; give auto, off, or a file"),
        ({"chat_kwargs": "enable_thinking"}, "--chat_kwargs=enable_thinking: write NAME=VALUE"),
        ({"chat_kwargs": "a b=1"}, "--chat_kwargs=a b=1: write NAME=VALUE"),
        (
            {"chat_kwargs": "enable_thinkng=1"},
            "enable_thinkng=...: the chat template does not read this name; it reads enable_thinking$",
        ),
        ({"chat_kwargs": "messages=1"}, "--chat_kwargs=messages=...: the chat template does not read this name"),
        (
            {"chat_kwargs": "a=1", "chat_template": "off"},
            "--chat_kwargs: there is no chat template to read the arguments; leave",
        ),
        (
            {"system_prompt": "not_there.txt"},
            "--system_prompt=not_there.txt: no such file; give an existing file, or a text",
        ),
    ],
)
def test_bad_prompt_flags(tokenizer, flags, sentence):
    with pytest.raises(ValueError, match=sentence):
        prompt_of(tokenizer, "p", **flags)


def test_an_error_of_a_template_is_one_sentence(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('no system here') if messages[0].role == 'system' }}x"
    with pytest.raises(ValueError, match="x/0: the chat template rejects this prompt .no system here.; check --system"):
        prompt_of(tokenizer, "p", system_prompt="S")


# ---------------------------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reward, right, wrong", [("gsm8k", "1,200", "\\frac{14}{3}"), ("praxis*2", "7", "x")])
def test_answers_that_a_reward_cannot_grade_are_refused(tmp_path, reward, right, wrong):
    """A number must follow ####: fractions would score 0 % without notice."""
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    write(good, {"problem": "p", "answer": right})
    write(bad, json.dumps({"problem": "p", "answer": right}) + "\n" + json.dumps({"problem": "q", "answer": wrong}))
    defaults = {"samples": 1, "temperature": 1.0, "max_tokens": 32}
    cfg = cfg_of(task=str(good), reward=reward, eval_task=f"{good},{bad}")
    task = make_task(cfg)
    assert task.rewards([Answer(task.problem("train", 0), f"#### {right}", True)])[0][0] >= 1
    with pytest.raises(
        ValueError, match="eval_task=.*bad.jsonl: under --reward=.* no response can be right .* use --reward="
    ):
        eval_sets(cfg, "eval_task", defaults)
    assert len(eval_sets(replace(cfg, reward="math"), "eval_task", defaults)) == 2
    with pytest.raises(ValueError, match="--task=.*good.jsonl: under --reward=letter no response can be right if the"):
        make_task(replace(cfg, reward="letter"))


def test_a_problem_with_a_box_gets_the_template_of_a_different_reward(tmp_path):
    path = write(tmp_path / "x.jsonl", {"problem": "Put it in \\boxed{}.", "answer": "7"})
    of = {name: make_task(cfg_of(task=path, reward=name)).problem("train", 0).prompt for name in ("math", "gsm8k")}
    assert of["math"] == "Put it in \\boxed{}." and of["gsm8k"].startswith(of["math"]) and "####" in of["gsm8k"]


def test_held_out_sets_can_have_default_columns(tmp_path):
    """Default columns are read if a set lacks the named ones; a training file must have the named columns."""
    mine, other = tmp_path / "mine.jsonl", tmp_path / "other.jsonl"
    write(mine, {"text": "mine?", "gold": "1", "answer": "9"})
    write(other, {"problem": "other?", "answer": "2"})
    cfg = cfg_of(task=str(mine), columns="prompt=text, answer=gold", eval_task=f"{mine},{other}")
    defaults = {"samples": 1, "temperature": 1.0, "max_tokens": 32}
    problems = [one.task.problem("test", 0) for one in eval_sets(cfg, "eval_task", defaults)]
    assert [(p.prompt.partition("\n")[0], p.answer) for p in problems] == [("mine?", "1"), ("other?", "2")]
    with pytest.raises(ValueError, match="other.jsonl, line 1: no `text` text; add one"):
        make_task(replace(cfg, task=str(other)))


def test_a_custom_class_has_named_columns(tmp_path):
    path = write(
        tmp_path / "own.py",
        "class T:\n    size = 1\n    def problem(self, split, index):\n"
        "        return {'text': 't', 'gold': '3', 'answer': '4'}\n",
    )
    task = make_task(cfg_of(task=f"{path}:T", columns="prompt=text,answer=gold", reward="math"))
    assert task.problem("train", 0).answer == "3"


@pytest.mark.parametrize(
    "solution, answer",
    [
        ("so $x$ is $\\boxed 2$.", "2"),
        ("it is \\boxed 3.5.", "3.5"),
        ("\\boxed{1} or \\boxed{}", ""),
        ("\\boxed {4}", "4"),
        ("7", "7"),
    ],
)
def test_the_box_of_a_worked_solution(solution, answer):
    assert final_answer(solution) == answer


def test_two_splits_of_one_data_set_have_different_names():
    assert label_of("hf:openai/gsm8k@main/test") == "gsm8k"
    assert label_of("hf:openai/gsm8k@main/test", whole=True) == "gsm8k-main-test"
    assert label_of("hf:Qwen/Foo-2.5-Math/test") == "Foo-2.5-Math"
    assert label_of("data/math500.jsonl", whole=True) == "math500"


def test_long_prompts_are_dropped_and_counted(tokenizer, tmp_path):
    rows = [{"problem": "p" * n, "answer": str(n)} for n in (3, 40, 5, 60, 7)]
    path = write(tmp_path / "x.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    task = Table(path, read_rows(path), Style(template="{problem}", chat=Chat(template="")), Reward())
    assert task.fit(tokenizer) == 61 and (task.size, task.dropped) == (5, 0)  # the mark counts
    assert task.fit(tokenizer, 41) == 41 and (task.size, task.dropped) == (4, 1)
    assert task.fit(tokenizer, 40) == 8 and (task.size, task.dropped) == (3, 2)
    assert [task.problem("test", i).answer for i in range(4)] == ["3", "5", "7", "3"]
    for epoch in (0, 1):
        drawn = [task.problem("train", 3 * epoch + i) for i in range(3)]
        assert sorted(p.answer for p in drawn) == ["3", "5", "7"]
        assert all(task.find(p.id) == p for p in drawn)
    with pytest.raises(
        ValueError, match="--max_prompt_tokens=3: every prompt of .* is longer; the shortest prompt has 4 tokens"
    ):
        task.fit(tokenizer, 3)


def test_one_shuffle_an_epoch(tmp_path, monkeypatch):
    path = write(tmp_path / "x.jsonl", "".join(f'{{"problem": "p{i}", "answer": "{i}"}}\n' for i in range(50)))
    shuffles = []
    original = __import__("random").Random.shuffle
    monkeypatch.setattr("random.Random.shuffle", lambda self, x: (shuffles.append(1), original(self, x))[1])
    task = make_task(cfg_of(task=path))
    drawn = [task.problem("train", i).answer for i in range(100)]
    assert len(shuffles) == 2
    assert sorted(drawn[:50]) == sorted(drawn[50:]) and drawn[:50] != drawn[50:]
    assert [task.problem("train", i).answer for i in (3, 60, 3)] == [drawn[3], drawn[60], drawn[3]]


OWN = """
import helper

class Double:
    size = None

    def problem(self, split, index):
        return {"prompt": f"{split} 2 * {index}", "answer": 2 * index, "n": index}

    def reward(self, row, text, finish_reason):
        return {"right": helper.right(row, text), "ended": 0.25 * (finish_reason == "stop")}

class Few(Double):
    size = 3

class Long(Few):
    def problem(self, split, index):
        if index == 0:
            return super().problem(split, index)
        return {"prompt": "p" * (10 * index + 5 * (split == "test")), "answer": index}

class Endless(Long):
    size = None

class Lost:
    pass

class None0(Few):
    size = 0

class Less(Few):
    size = -3

class Word(Few):
    size = "10"

class Method(Few):
    def size(self):
        return 3

class Broken(Double):
    def problem(self, split, index):
        return {"prompt": "p", "answer": 1 / index}
"""


def test_a_custom_class(tokenizer, tmp_path):
    """Its file can import its neighbours; it grades its answers, with named parts."""
    write(tmp_path / "helper.py", "def right(row, text):\n    return float(text == str(2 * row['n']))\n")
    name = write(tmp_path / "own.py", OWN) + ":Double"
    task = make_task(cfg_of(task=name, max_prompt_tokens=99))
    assert task.size is None and task.fit(tokenizer, 99) == 99
    p = task.problem("train", 7)
    assert (p.prompt, p.answer, p.id) == ("train 2 * 7", "14", "Double/train/7")
    assert task.find(p.id) == p
    rewards, counts = task.rewards([Answer(p, "14", True), Answer(p, "14", False), Answer(p, "15", True)])
    assert rewards == [1.25, 1.0, 0.25]
    assert counts == Counter({"answers": 3, "reward/Double.reward/right": 2, "reward/Double.reward/ended": 0.5})
    few = make_task(cfg_of(task=name.replace("Double", "Few")))
    assert [few.problem("test", i).id for i in (0, 4)] == ["Few/test/0", "Few/test/1"]
    with pytest.raises(ValueError, match="--max_prompt_tokens: .*:Double is endless"):
        task.fit(tokenizer)
    for attribute, sentence in (
        ("Lost", r"needs a method problem\(split, index\) and an attribute size"),
        ("Nosuch", "own.py:Nosuch: cannot be loaded .AttributeError"),
        ("Broken", r"problem\('train', 0\) raised ZeroDivisionError: division by zero .own.py, line [0-9]+."),
        ("None0", "own.py:None0: its size is 0; it must be a whole number of problems above 0, or None: endless"),
        ("Less", "its size is -3; it must be"),
        ("Word", "its size is '10'; it must be"),
        ("Method", "its size is <bound method"),
    ):
        with pytest.raises(ValueError, match=sentence):
            make_task(cfg_of(task=name.replace("Double", attribute)))


def test_long_prompts_of_a_custom_class(tokenizer, tmp_path):
    """They are dropped in both splits of a finite class; in an endless class they are an error."""
    write(tmp_path / "helper.py", "def right(row, text):\n    return 0.0\n")
    path = write(tmp_path / "own.py", OWN)
    task = make_task(cfg_of(task=f"{path}:Long", prompt_template="{problem}", chat_template="off"))
    assert task.fit(tokenizer) == 26 and (task.size, task.dropped) == (3, 0)  # one token each, and the mark
    assert task.fit(tokenizer, 25) == 16 and (task.size, task.dropped) == (2, 1)
    assert [task.problem("train", i).id for i in range(3)] == ["Long/train/0", "Long/train/1", "Long/train/0"]
    assert task.fit(tokenizer, 15) == 12 and (task.size, task.dropped) == (1, 2)  # only its test prompt is too long
    endless = make_task(cfg_of(task=f"{path}:Endless", prompt_template="{problem}", chat_template="off"))
    assert endless.fit(tokenizer, 15) == 15
    assert endless.problem("train", 1).answer == "1"
    with pytest.raises(ValueError, match="Endless/test/1: a prompt of 16 tokens, more than --max_prompt_tokens=15"):
        endless.problem("test", 1)


def test_digests_identify_the_same_task_on_two_hosts(tmp_path):
    path = write(tmp_path / "x.jsonl", {"problem": "p", "answer": "7"})
    module = write(tmp_path / "own.py", OWN)
    of_bytes = {name: hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in (path, module)}
    assert digest_of(path) == of_bytes[path] != digest_of(f"{module}:Double") == of_bytes[module]
    assert digest_of("arith") == "" and digest_of("hf:a/train") != digest_of("hf:a/test")


def test_a_reward_is_called_when_the_task_is_made(tmp_path):
    """On the first problem, before a model loads."""
    task, module = write(tmp_path / "x.jsonl", {"problem": "p", "answer": "7"}), tmp_path / "own.py"
    write(module, "def score(row, text, finish_reason):\n    return 1 / (int(row['answer']) - 7)\n")
    with pytest.raises(
        ValueError, match="own.py:score: on the first problem with the answer as response: ZeroDivision"
    ):
        make_task(cfg_of(task=task, reward=f"{module}:score"))


ONE = """
class T:
    size = 1

    def problem(self, split, index):
        return {{"prompt": "p", "answer": {n}}}

    def reward(self, row, text, finish_reason):
        return {n}
"""


def test_a_custom_reward_needs_no_answer(tmp_path):
    """The README's example grades by a column of tests. A part that grades by the answer needs the answer."""
    rows = [{"problem": "p", "tests": "1"}, {"problem": "q", "tests": "2", "answer": "", "choices": ["u", "v"]}]
    task = write(tmp_path / "x.json", rows)
    path = write(tmp_path / "own.py", "def score(row, text, finish_reason):\n    return float(text == row['tests'])\n")
    own_task = make_task(cfg_of(task=task, reward=f"{path}:score"))
    problems = [own_task.problem("test", i) for i in range(2)]
    assert [(p.answer, p.prompt.partition("\n")[0]) for p in problems] == [("", "p"), ("", "q")]
    assert own_task.rewards([Answer(p, "2", True) for p in problems])[0] == [0.0, 1.0]
    for flags in ({"reward": f"{path}:score,math*0.5"}, {}, {"reward": f"{path}:score", "columns": "answer=gold"}):
        with pytest.raises(ValueError, match="x.json, row 1: no `.*` that is a text or a number"):
            make_task(cfg_of(task=task, **flags))
    unanswered = write(tmp_path / "two.py", ONE.format(n=3).replace('"answer": 3', '"n": 4'))
    task = make_task(cfg_of(task=f"{unanswered}:T"))
    assert task.rewards([Answer(task.problem("train", 0), "x", False)])[0] == [3.0]
    with pytest.raises(ValueError, match="T, train problem 0: no `answer` that is a text or a number"):
        make_task(cfg_of(task=f"{unanswered}:T", reward="math"))


def test_evaluation_sets_have_separate_settings(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / f"{name}.jsonl", {"problem": "p", "answer": "1"})
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    defaults = {"samples": 4, "temperature": 1.0, "max_tokens": 32}
    cfg = cfg_of(task=str(a), reward="math,boxed*0.5", overlong=8, eval_task=f"{a}, {b}:temperature=0.6:samples=32")
    first, second = eval_sets(cfg, "eval_task", defaults)
    assert (first.label, first.samples, first.temperature, first.max_tokens) == ("a", 4, 1.0, 32)
    assert (second.label, second.samples, second.temperature, second.max_tokens) == ("b", 32, 0.6, 32)
    answer = Answer(first.task.problem("test", 0), "\\boxed{1}", True, 32)
    assert first.task.rewards([answer])[0] == [1.0]  # only the first part, without a penalty
    assert make_task(cfg).rewards([answer])[0] == [0.5]
    halved = replace(cfg, reward="math*0.5")  # a right answer counts 1 for every weight
    assert eval_sets(halved, "eval_task", defaults)[0].task.rewards([answer])[0] == [1.0]
    assert make_task(halved).rewards([answer])[0] == [-0.5]
    for text, sentence in (
        (f"{a},{a}", "two sets have the same name"),
        (f"{a}:n=3", "a.jsonl:n=3: no such setting; the settings are samples=, temperature=, max_tokens="),
        (f"{a}:samples=0", "samples=0: must be a number of at least 1"),
        (f"{a}:samples=1.5", "samples=1.5: must be a number of at least 1"),
        (f"{a}:temperature=nan", "temperature=nan: must be a number of at least 0"),
        (f"{a},", "a set has no name"),
    ):
        with pytest.raises(ValueError, match=sentence):
            eval_sets(cfg_of(eval_task=text), "eval_task", defaults)


@pytest.mark.parametrize("flag", ["system_prompt", "prompt_template", "chat_kwargs", "reward", "columns"])
def test_arith_refuses_flags_of_files(flag):
    with pytest.raises(ValueError, match=f"--{flag}=x: --task=arith does not use this flag; leave it out"):
        make_cfg(**{flag: "x"})


def test_files_of_one_name(tmp_path):
    """Files in two folders are two modules, in this process and in the grading processes."""
    tasks = []
    for n in (1, 2):
        (tmp_path / str(n)).mkdir()
        tasks.append(make_task(cfg_of(task=write(tmp_path / str(n) / "own.py", ONE.format(n=n)) + ":T")))
    for n, task in enumerate(tasks, 1):
        assert task.problem("train", 0).answer == str(n)
        assert task.rewards([Answer(task.problem("train", 0), "x", True)])[0] == [n]
    assert "own" not in sys.modules
