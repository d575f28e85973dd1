"""Tasks: generated arithmetic, files, and the grader on cases written for this repository."""

import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import sympy.core.random
from conftest import ROOT, make_cfg

import tasks
import warmstart
from engines import HFEngine
from eval import grade_gold, perturbed, wrapped
from rollout import LocalSource, request_seed
from sampling import Sampling
from tasks import (
    VOCAB,
    Answer,
    Arithmetic,
    Graders,
    Jsonl,
    Problem,
    arithmetic_tokenizer,
    final_answer,
    grade,
    graders,
    last_box,
    read_jsonl,
    stop_ids,
)


def held_out(problem) -> bool:
    """The rule by which train and test are disjoint: one problem in eight, by the hash of its text."""
    return hashlib.sha256(problem.id.encode()).digest()[0] < 32


def test_arithmetic_is_verifiable_deterministic_and_split():
    task = Arithmetic(seed=3)
    tokenizer = arithmetic_tokenizer()
    train = [task.problem("train", i) for i in range(400)]
    test = [task.problem("test", i) for i in range(200)]
    assert not {p.id for p in train} & {p.id for p in test}
    assert not any(map(held_out, train)) and all(map(held_out, test))
    assert train == [Arithmetic(seed=3).problem("train", i) for i in range(400)]
    assert train != [Arithmetic(seed=4).problem("train", i) for i in range(400)]
    for p in train + test:
        words = p.id.split()
        total = int(words[0])
        for sign, b in zip(words[1::2], words[2::2], strict=True):
            assert 1 <= int(b) <= 9
            total += int(b) if sign == "+" else -int(b)
            assert 0 <= total <= 29
        assert task.find(p.id) == p
        assert str(total) == p.answer
        assert 3 <= len(words) // 2 <= 5
        text = task.solution(p)
        assert task.reward(p, text, True) == 1.0
        assert task.reward(p, text, False) == 0.0
        ids = tokenizer.encode(text)
        assert len(ids) + 1 <= task.max_response()
        assert len(tokenizer.encode(p.prompt)) <= task.max_prompt()
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text
    assert len(tokenizer) == VOCAB >= 256 and VOCAB % 32 == 0


def test_careless_solutions_go_on_from_their_slip():
    task = Arithmetic()
    wrong = 0
    for i in range(300):
        p = task.problem("train", i)
        text = task.solution(p, slips=0.2)
        wrong += task.reward(p, text, True) == 0.0
        steps = [s.split() for s in text.split(" # ")[0].split(" ; ")]
        assert all(before[4] == after[0] for before, after in pairwise(steps))
        assert text.split(" # ")[1] == steps[-1][4]
    assert 0.3 < wrong / 300 < 0.8


@pytest.mark.parametrize(
    "text, reward", [("3 + 4 = 7 # 7", 1), ("# 7", 1), ("# 8", 0), ("7", 0), ("# 7 ;", 0), ("# 77", 0), ("", 0)]
)
def test_arithmetic_reward(text, reward):
    assert Arithmetic().reward(Problem("3 + 4", "3 + 4 :", "7"), text, True) == reward


@pytest.mark.parametrize(
    "text, reward",
    [
        ("3 + 4 = 7 # 7", 1),
        ("# 7 ; 3 + 4 = 7", 1 + 6 / 8),
        ("# 7 ; ;", 1 + 2 / 8),
        ("# 7" + " ;" * 30, 2),
        ("# 8 ; 3 + 4 = 7", 0),
        ("# 7 # 7", 0),
        ("# 7 ; # 8", 0),
        ("3 + 4 = 7 ; 7", 0),
        ("# 77 ; ;", 0),
        ("", 0),
    ],
)
@pytest.mark.parametrize("finished", [True, False])
def test_reward_of_long_explanations(text, reward, finished):
    """A right answer, one `#`, and a bonus for what stands behind it, whether the response ended or not."""
    assert Arithmetic(explain=8).reward(Problem("3 + 4", "3 + 4 :", "7"), text, finished) == pytest.approx(reward)


def test_demonstrations_with_explanations():
    task = Arithmetic(explain=224)
    tokenizer = arithmetic_tokenizer()
    behind = []
    for i in range(300):
        p = task.problem("train", i)
        text = task.solution(p)
        steps = text.split(" # ")[0].split(" ; ")
        answer, *restated = text.split(" # ")[1].split(" ; ")
        assert answer == p.answer
        assert set(restated) <= set(steps)
        assert len(tokenizer.encode(text)) + 1 <= task.max_response()
        assert task.reward(p, text, True) == pytest.approx(1 + 6 * len(restated) / 224)
        behind.append(len(restated))
    assert 4 < sum(behind) / 300 < 6
    assert max(behind) == 16
    short = [Arithmetic(explain=7).solution(task.problem("train", i)).split(" # ")[1].count(";") for i in range(50)]
    assert max(short) == 1


RIGHT = [
    ("The total is \\boxed{72}.", "72"),
    ("so we get $\\boxed{\\frac{3}{4}}$", "0.75"),
    ("\\boxed{\\frac{1}{2}}", "\\frac12"),
    ("\\boxed{1{,}000}", "1000"),
    ("\\boxed{x^2+2x+1}", "(x+1)^2"),
    ("\\boxed{\\sqrt{8}}", "2\\sqrt{2}"),
    ("\\boxed{(1, 2)}", "(1,2)"),
    ("\\boxed{\\{1,2,3\\}}", "\\{3,2,1\\}"),
    ("\\boxed{[0, 1)}", "[0,1)"),
    ("\\boxed{50\\%}", "50\\%"),
    ("\\boxed{\\pi/2}", "\\frac{\\pi}{2}"),
    ("\\boxed{-3}", "-3"),
    ("\\boxed{2^{10}}", "1024"),
    ("\\boxed{\\text{(B)}}", "\\text{(B)}"),
    ("\\boxed{3.0}", "3"),
    ("\\boxed{x=5}", "5"),
    ("\\boxed{\\$18}", "18"),
]
WRONG = [
    ("\\boxed{73}", "72"),
    ("\\boxed{\\frac{4}{3}}", "0.75"),
    ("I do not know.", "5"),
    ("\\boxed{}", "5"),
    ("\\boxed{(2,1)}", "(1,2)"),
    ("\\boxed{[0,1]}", "[0,1)"),
    ("\\boxed{x^2+1}", "(x+1)^2"),
    ("\\boxed{3}", "-3"),
    ("\\boxed{1025}", "2^{10}"),
    ("\\boxed{\\{1,2\\}}", "\\{1,2,3\\}"),
    ("\\boxed{\\pi}", "3"),
    ("The answer is 5, no: \\boxed{6}", "5"),
    ("\\boxed{12}", "1200"),
]


@pytest.mark.parametrize("response, answer", RIGHT)
def test_right_answers(response, answer):
    assert grade(response, answer)


@pytest.mark.parametrize("response, answer", WRONG)
def test_wrong_answers(response, answer):
    assert not grade(response, answer)


BOXES = [
    ("so \\boxed{5}.", "5"),
    ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
    ("\\boxed{1} and then \\boxed{2}, done", "2"),
    ("\\boxed{\\{1, 2\\}} }", "\\{1, 2\\}"),
    ("\\boxed{\\left\\{x\\right.}", "\\left\\{x\\right."),
    ("\\boxed{a\\\\}b}", "a\\\\"),
    ("\\boxed {7}", "7"),
    ("\\boxed{\\boxed{5}}", "5"),
    ("\\boxed{\n3\n}", "\n3\n"),
    ("5", None),
    ("", None),
    ("\\boxed{}", None),
    ("\\boxed{ }", None),
    ("\\boxed 5", None),
    ("\\boxed{1} so \\boxed{\\frac{1}{2", None),
    ("\\boxed{\\text{a}", None),
    ("\\boxed{" * 100_000, None),
]


@pytest.mark.parametrize("text, inside", BOXES)
def test_the_last_box_alone_counts(text, inside):
    assert last_box(text) == (None if inside is None else f"\\boxed{{{inside}}}")


# ---------------------------------------------------------------------------------------------------------------------
# Grading processes. The power tower is one number of more digits than there are atoms: Python never comes back from it
# ---------------------------------------------------------------------------------------------------------------------

TOWER = "\\boxed{9^{9^{9^9}}}"


def math_task(tmp_path, *answers, **settings) -> Jsonl:
    path = tmp_path / "math.jsonl"
    path.write_text("".join(json.dumps({"problem": "p", "answer": a}) + "\n" for a in answers))
    return Jsonl(str(path), **settings)


def said(task, *texts) -> list[Answer]:
    """These responses to the task's first problem."""
    return [Answer(task.problem("test", 0), text, True) for text in texts]


def alive(pid: int) -> bool:
    """Is there such a process, and not only what is left of it until its parent asks?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def until(seconds: float, condition) -> bool:
    """Waits for the condition, at most so long; whether it came true."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def test_an_answer_without_end_costs_itself_alone(tmp_path):
    """Others in its chunk are graded, and the same answer again is not tried again."""
    task = math_task(tmp_path, "5", seconds=0.5)
    answers = said(
        task, "\\boxed{5}", TOWER, "\\boxed{5.0}", "\\boxed{6}", TOWER, "5", *(f"\\boxed{{{i}}}" for i in range(40))
    )
    start = time.monotonic()
    rewards, counts = task.rewards(answers)
    assert time.monotonic() - start < 60
    assert rewards[:6] == [1, 0, 1, 0, 0, 0]
    assert rewards[6:] == [float(i == 5) for i in range(40)]
    assert counts == Counter(answers=46, timeouts=2, unboxed=1)


def test_equal_answers_are_graded_once(tmp_path, monkeypatch):
    """And an answer without a box not at all."""
    task = math_task(tmp_path, "5", "6", seconds=3.0)
    asked = []

    class Watched(Graders):
        def grade(self, pairs, seconds):
            asked.append((pairs, seconds))
            return super().grade(pairs, seconds)

    pool = Watched(1)
    monkeypatch.setattr(tasks, "graders", lambda: pool)
    texts = ("so \\boxed{5}", "\\boxed{5}.", "none", "\\boxed{6}")
    answers = [Answer(task.problem("test", i), text, True) for i in (0, 1) for text in texts]
    try:
        assert task.rewards(answers) == ([1, 1, 0, 0, 0, 0, 0, 1], Counter(answers=8, unboxed=2))
    finally:
        pool.close()
    assert asked == [([(f"\\boxed{{{said}}}", gold) for gold in "56" for said in "56"], 3.0)]


def test_verdicts_do_not_depend_on_what_was_graded_before():
    """sympy's random numbers start anew with every answer, and every process hashes alike."""
    states = []
    for seed in (1, 2):
        sympy.core.random.seed(seed)
        grade("\\boxed{x+1}", "1+x")
        states.append(sympy.core.random.rng.getstate())
    assert states[0] == states[1]
    pool = Graders(1)
    try:
        pool.grade([("\\boxed{1}", "1")], 5.0)
        assert b"PYTHONHASHSEED=0" in Path(f"/proc/{pool.processes[0].process.pid}/environ").read_bytes().split(b"\0")
    finally:
        pool.close()


def test_what_counts_as_the_answer(tmp_path):
    texts = (
        "\\boxed{5}",
        "it is 5",
        "\\boxed{4} no, \\boxed{5}",
        "\\boxed{5} no, \\boxed{4}",
        "\\boxed{5} so \\boxed{5",
        "?",
    )
    boxed, last = (math_task(tmp_path, "5", answer=answer) for answer in ("boxed", "last"))
    assert boxed.rewards(said(boxed, *texts)) == ([1, 0, 1, 0, 0, 0], Counter(answers=6, unboxed=3))
    rewards, counts = last.rewards(said(last, *texts))
    assert rewards[:2] == [1, 1] and rewards[5] == 0
    assert counts == Counter(answers=6, unboxed=3)


def test_responses_are_compared_with_their_own_problem(tmp_path):
    task = math_task(tmp_path, *map(str, range(50)))
    answers = [Answer(task.problem("test", i), f"\\boxed{{{j}}}", True) for i in range(50) for j in (i, i + 1)]
    assert task.rewards(answers)[0] == 50 * [1.0, 0.0]


def test_grading_processes_are_kept_light_and_replaced():
    pool = Graders(2)
    pairs = [(f"\\boxed{{{i}}}", "7") for i in range(30)]
    wanted = [i == 7 for i in range(30)]
    try:
        assert pool.processes == []
        assert pool.grade(pairs, 5.0) == wanted
        first = [p.process.pid for p in pool.processes]
        assert len(first) == 2
        assert not any(name in Path(f"/proc/{pid}/maps").read_text() for pid in first for name in ("libtorch", "numpy"))
        assert pool.grade(pairs, 5.0) == wanted
        assert [p.process.pid for p in pool.processes] == first
        os.kill(first[0], signal.SIGKILL)
        assert until(10, lambda: not alive(first[0]))
        assert pool.grade(pairs, 5.0) == wanted  # an idle one that has died costs nothing
        assert pool.grade([], 5.0) == []
        assert first[0] not in [p.process.pid for p in pool.processes] and len(pool.processes) == 2
    finally:
        pool.close()


def test_a_process_that_dies_costs_the_answer_at_hand():
    """As by a fault in a library, or by the kernel where memory runs out."""
    pool = Graders(1)
    try:
        assert pool.grade([("\\boxed{1}", "1")], 5.0) == [True]
        pid = pool.processes[0].process.pid
        threading.Timer(1.0, os.kill, (pid, signal.SIGSEGV)).start()
        assert pool.grade([("\\boxed{1}", "1"), (TOWER, "1"), ("\\boxed{2}", "2")], 100.0) == [True, None, True]
    finally:
        pool.close()


def test_a_process_that_is_stopped_is_given_up(monkeypatch):
    monkeypatch.setattr(tasks, "SILENCE", 1.0)
    pool = Graders(1)
    try:
        while not pool.processes or not pool.processes[0].ready:  # on a busy machine its start may last longer
            pool.grade([("\\boxed{1}", "1")], 5.0)
        os.kill(pool.processes[0].process.pid, signal.SIGSTOP)
        assert pool.grade([("\\boxed{1}", "1"), ("\\boxed{2}", "2")], 0.3) == [None, True]
    finally:
        pool.close()


def test_memory_is_bounded():
    """An answer for which it does not suffice is wrong, and costs the next one nothing."""
    pool = Graders(1)
    large = "\\boxed{" + 200 * "0+" + "1}"
    try:
        assert pool.grade([("\\boxed{1}", "1")], 5.0) == [True]
        pid = pool.processes[0].process.pid
        assert resource.prlimit(pid, resource.RLIMIT_AS) == (tasks.MEMORY, tasks.MEMORY)
        used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(pid, resource.RLIMIT_AS, (used, tasks.MEMORY))
        first, second = pool.grade([(large, "1"), ("\\boxed{2}", "2")], 60.0)
        assert not first and second
        pool.close()
        assert pool.grade([(large, "1")], 60.0) == [True]
    finally:
        pool.close()


def test_processes_that_cannot_start_are_an_error(monkeypatch):
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    pool = Graders(1)
    with pytest.raises(RuntimeError, match="grading processes end before they are ready .exit code 1."):
        pool.grade([("\\boxed{1}", "1")], 5.0)
    assert pool.processes == []


def test_an_exception_in_the_middle_leaves_nothing_behind():
    """What was asked before it is not taken for the answer to what is asked next."""

    class StopError(Exception):
        pass

    def stop(number, frame):
        raise StopError

    before = signal.signal(signal.SIGUSR1, stop)
    pool = Graders(1)
    try:
        assert pool.grade([("\\boxed{1}", "1")], 5.0) == [True]
        pid = pool.processes[0].process.pid
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(StopError):
            pool.grade([(TOWER, "1"), ("\\boxed{1}", "1")], 100.0)
        assert not alive(pid)
        assert pool.grade([("\\boxed{1}", "2"), ("\\boxed{1}", "1")], 5.0) == [False, True]
    finally:
        pool.close()
        signal.signal(signal.SIGUSR1, before)


GRADES = """
import signal, sys, threading, time
from tasks import Graders

for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: print("heard", flush=True))
pool = Graders(2)
pool.grade([("\\\\boxed{1}", "1"), ("\\\\boxed{2}", "2")], 5.0)
print(*[p.process.pid for p in pool.processes], flush=True)
print(pool.grade([(r"TOWER", "1")], float(sys.argv[1])), flush=True)
"""


def hanging(seconds: float):
    """A process in which one of two graders has an answer without end; and the process ids of the graders."""
    code = GRADES.replace("TOWER", TOWER)
    process = subprocess.Popen([sys.executable, "-c", code, str(seconds)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(1.0)  # until the answer has arrived
    return process, pids


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_heard_while_an_answer_hangs(number):
    """They come to all processes of a job, from its scheduler or from the keyboard, and the graders go on."""
    process, pids = hanging(3.0)
    try:
        for pid in (*pids, process.pid):
            os.kill(pid, number)
        assert process.stdout.readline() == "heard\n"
        time.sleep(0.5)  # a process that had died of it would be gone now
        assert process.poll() is None and all(map(alive, pids))
        assert process.stdout.readline() == "[None]\n"
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def test_graders_end_with_their_parent():
    """The idle one at once, the other one when the time of its answer is over."""
    process, pids = hanging(3.0)
    process.kill()
    process.communicate()
    assert until(60, lambda: not any(map(alive, pids)))


def test_graders_are_shared_out_among_the_ranks_of_a_host(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    sizes = []
    for ranks in ("1", "4", "24"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        sizes.append(graders.__wrapped__().size)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert [*sizes, graders.__wrapped__().size] == [12, 3, 1, 12]
    assert graders() is graders()


DATA = sorted((ROOT.parent / "shared" / "data").glob("*.jsonl"))  # not part of the repository


@pytest.mark.skipif(not DATA, reason="the real files are not here")
@pytest.mark.parametrize("path", DATA, ids=lambda path: path.stem)
def test_gold_answers_of_real_files(path, tmp_path):
    """A hundred of each file."""
    few = tmp_path / path.name
    few.write_text("".join(path.read_text().splitlines(keepends=True)[:100]))
    result = grade_gold(str(few))
    assert result["gold"] == 1.0 and result["changed"] <= 0.01


def test_grade_gold_reads_both_layouts(tmp_path, capsys):
    gsm = tmp_path / "gsm.jsonl"
    math = tmp_path / "math.jsonl"
    gsm_rows = [
        {"question": "2 apples and 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"},
        {"question": "q", "answer": "#### 1,200"},
    ]
    gsm.write_text("".join(json.dumps(row) + "\n" for row in gsm_rows))
    math.write_text('{"problem": "p", "answer": "\\\\frac{1}{2}"}\n\n{"problem": "p", "answer": "x+1"}\n')
    for path in (gsm, math):
        result = grade_gold(str(path))
        assert result == {"file": str(path), "problems": 2, "gold": 1.0, "changed": 0.0}
    assert final_answer("a\n#### 1,200") == "1,200"
    assert perturbed("19") == "29"
    assert perturbed("0.09") == "0.08"
    assert perturbed("x") == "x + 1"
    assert "\\boxed{7}" in wrapped("7")


@pytest.mark.parametrize(
    "text, sentence",
    [
        ('{"problem": "p", "answer": "1"}\n{"problem": "p"}\n', "line 2: no `answer`"),
        ('{"problem": "p", "answer": "1"}\n\n{nope}\n', "line 3: not valid JSON"),
        ('{"answer": "1"}\n', "line 1: no `problem` or `question`"),
        ("[1]\n", "line 1: not a JSON object"),
        ("", "no problems in the file"),
        ('{"problem": "p", "answer": ""}', "line 1: the `answer` is empty"),
        ('{"problem": "p", "answer": "2 + 3 = 5 #### "}', "line 1: the `answer` is empty"),
        ('{"problem": "p", "answer": null}', "line 1: no `answer` that is a text or a number"),
        ('{"problem": "p", "answer": true}', "line 1: no `answer` that is a text or a number"),
        ('{"problem": "p", "answer": ["5"]}', "line 1: no `answer` that is a text or a number"),
        ('{"problem": "p", "answer": NaN}', "line 1: the `answer` is nan, which no response can equal"),
        ('{"problem": "p", "answer": "NaN"}', "line 1: the `answer` is NaN, which no response can equal"),
        ('{"problem": "p", "answer": -Infinity}', "line 1: the `answer` is -inf, which"),
        ('{"problem": "p", "answer": 1e999}', "line 1: the `answer` is inf, which"),
        ('{"problem": "p", "answer": ' + 5000 * "1" + "}", "line 1: not valid JSON .Exceeds the limit"),
        ('{"problem": ' + 100_000 * "[" + "}", "line 1: not valid JSON"),
    ],
)
def test_bad_lines_are_named(tmp_path, text, sentence):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        read_jsonl(path)
    with pytest.raises(ValueError, match="no such file"):
        read_jsonl(tmp_path / "none.jsonl")
    path.write_bytes(b'{"problem": "caf\xe9", "answer": 1}')
    with pytest.raises(ValueError, match="x.jsonl: not a text file in UTF-8 .byte 16.; convert it"):
        read_jsonl(path)


def test_lines_end_where_json_says(tmp_path):
    """Some characters divide lines for Python and may stand inside a string of JSON; Windows marks its files."""
    path = tmp_path / "x.jsonl"
    path.write_text('\ufeff{"problem": "a\u2028b\x85c", "answer": 1.5}\r\n{"problem": "p", "answer": "0"}\n', "utf-8")
    assert read_jsonl(path) == [{"text": "a\u2028b\x85c", "answer": "1.5"}, {"text": "p", "answer": "0"}]


def test_jsonl_epochs_shuffle_and_prompts_ask_for_a_box(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(f'{{"problem": "p{i}", "answer": "{i}"}}\n' for i in range(10)))
    task = Jsonl(str(path))
    first = [task.problem("train", i).answer for i in range(10)]
    second = [task.problem("train", 10 + i).answer for i in range(10)]
    assert sorted(first) == sorted(second) == sorted(map(str, range(10)))
    assert first != second
    assert [task.problem("test", i).answer for i in range(10)] == list(map(str, range(10)))
    p = task.problem("test", 3)
    assert task.find(p.id) == p
    assert p.id == "x/3"
    assert p.prompt.startswith("p3\n")
    assert "\\boxed{}" in p.prompt
    answers = [Answer(p, "\\boxed{3}", False), Answer(p, "\\boxed{4}", True)]
    assert task.rewards(answers) == ([1.0, 0.0], Counter(answers=2))


# ---------------------------------------------------------------------------------------------------------------------
# Tokens that end a response
# ---------------------------------------------------------------------------------------------------------------------


def with_ends(folder, to, ends):
    """A copy of a model folder whose generation_config.json lists these ends."""
    shutil.copytree(folder, to)
    (to / "generation_config.json").write_text(json.dumps({"eos_token_id": ends, "temperature": 0.6}))
    return to


def test_ends_are_the_tokenizers_the_models_and_ones_of_your_own(folders, tmp_path):
    tokenizer = arithmetic_tokenizer()
    two = with_ends(folders / "actor", tmp_path / "two", [9, 1, 8])
    one = with_ends(folders / "actor", tmp_path / "one", 12)
    none = with_ends(folders / "actor", tmp_path / "none", None)
    assert stop_ids(tokenizer, []) == [1]
    assert stop_ids(tokenizer, [two, one, none, "base:policy"]) == [1, 9, 8, 12]
    assert stop_ids(tokenizer, [one], "#, ;,") == [1, 12, tokenizer.encode("#")[0], tokenizer.encode(";")[0]]
    for word in ("nosuch", "1 2", "2000"):
        with pytest.raises(ValueError, match=f"--stop={word}: not one token of the model's vocabulary"):
            stop_ids(tokenizer, [], f";,{word}")
    for wrong in ([1, "x"], ["7"], [True], 1.5):
        with pytest.raises(ValueError, match="generation_config.json: its eos_token_id lists"):
            stop_ids(tokenizer, [with_ends(folders / "actor", tmp_path / str(wrong), wrong)])
    (two / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match="two/generation_config.json: not a JSON object"):
        stop_ids(tokenizer, [two])
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no token that ends a response"):
        stop_ids(tokenizer, [none])


def test_a_run_has_the_ends_of_both_models(folders, tmp_path):
    policy = with_ends(folders / "policy", tmp_path / "policy", [1, 8])
    actor = with_ends(folders / "actor", tmp_path / "actor", [1, 9])
    cfg = make_cfg(model=str(policy), actor=str(actor), stop="10")
    tokenizer = arithmetic_tokenizer()
    assert tasks.run_stop_ids(tokenizer, cfg) == [1, 8, 9, tokenizer.encode("10")[0]]
    assert tasks.run_stop_ids(tokenizer, make_cfg(model="base:policy")) == [1]


@pytest.mark.parametrize("kind", ["hf", "vllm"])
def test_both_engines_end_at_either(kind, folders, tmp_path, request):
    """Responses end at the first of the two tokens, which is their last one, and say that they have stopped."""
    engine = request.getfixturevalue("vllm_engine") if kind == "vllm" else HFEngine(str(folders / "actor"))
    tokenizer = arithmetic_tokenizer()
    prompt = np.array(tokenizer.encode("3 + 4 :"), np.int32)
    seeds = [[request_seed("ends", i) for i in range(64)]]
    sampling = Sampling(max_tokens=24)
    free = engine.generate([prompt], seeds, sampling, 0, [1])[0]
    common = Counter(int(t) for r in free for t in r.tokens).most_common(3)
    other = next(t for t, _ in common if t != 1)
    ends = stop_ids(tokenizer, [with_ends(folders / "actor", tmp_path / "two", [1, other])])
    group = engine.generate([prompt], seeds, sampling, 0, ends)[0]
    stopped = [r for r in group if r.finish_reason == "stop"]
    assert {int(r.tokens[-1]) for r in stopped} >= {other}
    assert all(int(r.tokens[-1]) in ends for r in stopped)
    assert all(len(r.tokens) == 24 for r in group if r.finish_reason == "length")
    assert not any(set(r.tokens[:-1].tolist()) & set(ends) for r in group)
    for short, long in zip(group, free, strict=True):  # and up to there it is the same response
        assert short.tokens.tolist() == long.tokens[: len(short.tokens)].tolist()


def test_a_source_ends_responses_and_reports_its_grading(folders, tmp_path):
    """A model of random weights never writes a box; what was reported is not reported again."""
    task = math_task(tmp_path, "5", "6")
    engine, tokenizer = HFEngine(str(folders / "actor")), arithmetic_tokenizer()
    how = {"group_size": 8, "topk": 0, "model": "actor", "probe": None}
    source = LocalSource(engine, task, tokenizer, Sampling(max_tokens=12), stop_ids=list(range(100)), **how)
    groups = source.next(2, 0)
    responses = [r for g in groups for r in g.responses]
    assert all(r.tokens[-1] < 100 for r in responses if r.finish_reason == "stop")
    assert all((r.tokens[:-1] >= 100).all() for r in responses)
    assert source.metrics() == {"grade/timeouts": 0.0, "grade/unboxed": 1.0}
    assert source.metrics() == {}
    plain = LocalSource(engine, Arithmetic(), tokenizer, Sampling(max_tokens=2), **how)
    assert plain.stop_ids == [1]
    plain.next(2, 0)
    assert plain.metrics() == {}


def test_a_base_model_is_made_once_for_each_recipe(tmp_path, monkeypatch):
    """Policy and actor may stop at accuracies of their own: another accuracy is another folder."""
    made = []

    def warm_start(name, task, target, folder):
        made.append((name, target))
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(warmstart, "warm_start", warm_start)
    monkeypatch.setattr(warmstart, "check_weights", lambda folder: None)
    cfg = make_cfg(base_dir=str(tmp_path), base_accuracy=0.3, actor_base_accuracy=0.1)
    folders = {
        warmstart.base_model(name, c)
        for name in ("policy", "actor")
        for c in (cfg, cfg, replace(cfg, actor_base_accuracy=None))
    }
    assert made == [("policy", 0.3), ("actor", 0.1), ("actor", 0.3)]
    assert len(folders) == len(list(tmp_path.iterdir())) == 3
    assert warmstart.base_model("policy", replace(cfg, task_explain=8)) not in folders


def test_the_default_recipes_keep_their_keys():
    """Base models that were made before are found again."""
    assert warmstart.recipe_key("policy", Arithmetic(), 0.3) == "933ad702bd"
    assert warmstart.recipe_key("actor", Arithmetic(), 0.3) == "6d66f563a3"


def test_a_bonus_does_not_make_a_base_model_more_than_right(folders, monkeypatch):
    """The warm start stops at a share of right answers, whatever an explanation earns on top."""
    from transformers import AutoModelForCausalLM

    def grade_half(task, tokenizer, problems, groups):
        for i, group in enumerate(groups):
            group[0].reward = 1.7 if i % 2 else 0.0

    monkeypatch.setattr(warmstart, "grade_all", grade_half)
    model = AutoModelForCausalLM.from_pretrained(folders / "actor")
    assert warmstart.accuracy(model, arithmetic_tokenizer(), Arithmetic(1, 1, 3, 9), 8) == 0.5


@pytest.mark.parametrize(
    "flag, sentence",
    [
        (dict(task_min_ops=6), "--task_min_ops=6: must be between 1 and --task_max_ops=5"),
        (dict(task_explain=-1), "--task_explain=-1: must be 0 .no explanations. or more tokens"),
        (dict(grade_seconds=0.0), "--grade_seconds=0.0: a number of seconds above 0"),
        (dict(grade_seconds=float("nan")), "--grade_seconds=nan: a number of seconds above 0"),
        (dict(grade_seconds=float("inf")), "--grade_seconds=inf: a number of seconds above 0"),
        (dict(answer="first"), "--answer=first: not one of boxed, last"),
        (dict(task_total=200), "--task_total=200: must be below 200 and no less than --task_operand=9"),
    ],
)
def test_bad_flags(flag, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_cfg(**flag)


def test_explanations_are_for_arith_alone(folders):
    flags = dict(model=str(folders / "policy"), task="x.jsonl")
    make_cfg(**flags)
    with pytest.raises(
        ValueError, match="--task_explain=8: only --task=arith rewards explanations; leave it out for x"
    ):
        make_cfg(**flags, task_explain=8)


def test_a_response_longer_than_the_embedded_models_context():
    cfg = make_cfg(model="base:policy", max_tokens=500)
    warmstart.check(cfg, Arithmetic())  # 12 + 500 tokens: the whole context
    with pytest.raises(ValueError, match="--max_tokens=501: with prompts of up to 12 tokens that is over the model's"):
        warmstart.check(replace(cfg, max_tokens=501), Arithmetic())
