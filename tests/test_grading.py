"""Grading: built-in rewards on hand-written cases, custom rewards, and the grading processes."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import sympy.core.random
from conftest import ROOT
from test_hub import until

from config import SampleFlags
from tasks import builtin, grading, grading_metrics, make_task, rewards
from tasks.builtin import last_box
from tasks.data import Table
from tasks.grading import Graders
from tasks.prompts import Answer, Problem, Style
from tasks.rewards import Reward, parts_of


def calls(*pairs) -> list[tuple]:
    """(response, gold answer) pairs as calls of a built-in reward."""
    return [({"answer": gold}, response, "stop") for response, gold in pairs]


def graded(pool, pairs, seconds: float) -> list:
    return pool.grade("math", calls(*pairs), seconds)


def test_a_table_of_graded_responses():
    """258 pairs of a gold answer and a response, labelled by hand."""
    pairs = [json.loads(line) for line in (ROOT / "tests" / "graded.jsonl").read_text(encoding="utf-8").splitlines()]
    wrong = []
    for name in ("math", "gsm8k", "letter"):
        rows = [row for row in pairs if row["reward"] == name]
        asked = [Answer(Problem(str(i), "p", row["gold"]), row["response"], True) for i, row in enumerate(rows)]
        values = Reward(parts=parts_of(name)).values(rewards.Part(name, 1.0), asked)
        wrong += [row for row, value in zip(rows, values, strict=True) if bool(value) != row["right"]]
    assert len(pairs) == 258 and not wrong


def test_only_the_last_box_counts():
    boxes = {
        "\\boxed{1} and then \\boxed{2}, done": "\\boxed{2}",
        "\\boxed{\\left\\{x\\right.}": "\\boxed{\\left\\{x\\right.}",
        "\\boxed{a\\\\}b}": "\\boxed{a\\\\}",
        "\\boxed {7}": "\\boxed{7}",
        **dict.fromkeys(("\\boxed 5", "\\boxed{1} so \\boxed{\\frac{1}{2", "\\boxed{" * 100_000)),
    }
    assert {text: last_box(text) for text in boxes} == boxes


TOWER = "\\boxed{9^{9^{9^9}}}"


@pytest.fixture
def pool(monkeypatch):
    """A pool of one process, which rewards use too."""
    pool = Graders(1)
    monkeypatch.setattr(rewards, "graders", lambda: pool)
    yield pool
    pool.close()


def math_task(*answers, **settings) -> Table:
    rows = [{"prompt": "p", "answer": answer, "row": {}} for answer in answers]
    return Table("math.jsonl", rows, Style(), Reward(**settings))


def alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_an_endless_answer_fails_alone():
    """Answers in the same chunk are graded, and an equal endless answer is not tried again."""
    task = math_task("5", seconds=0.5)
    texts = ["\\boxed{5}", TOWER, "\\boxed{5.0}", "\\boxed{6}", TOWER, "5", *(f"\\boxed{{{i}}}" for i in range(40))]
    start = time.monotonic()
    rewards, counts = task.rewards([Answer(task.problem("test", 0), text, True) for text in texts])
    assert time.monotonic() - start < 60
    assert rewards == [1, 0, 1, 0, 0, 0, *(float(i == 5) for i in range(40))]
    assert counts == Counter({"answers": 46, "timeouts": 2, "unboxed": 1, "reward/math": 3, "plain": 46})


def test_equal_answers_are_graded_once(monkeypatch, pool):
    """An answer without a box is not graded at all; each response is compared with its own problem."""
    task = math_task("5", "6", seconds=3.0)
    calls_made, grade = [], pool.grade
    monkeypatch.setattr(pool, "grade", lambda *call: calls_made.append(call) or grade(*call))
    texts = ("so \\boxed{5}", "\\boxed{5}.", "none", "\\boxed{6}")
    answers = [Answer(task.problem("test", i), text, True) for i in (0, 1) for text in texts]
    earned, counts = task.rewards(answers)
    assert earned == [1, 1, 0, 0, 0, 0, 0, 1]
    assert counts == Counter({"answers": 8, "unboxed": 2, "reward/math": 3, "plain": 8})
    pairs = [(f"\\boxed{{{text}}}", gold) for gold in "56" for text in "56"]
    assert calls_made == [("math", calls(*pairs), 3.0)]


def test_verdicts_do_not_depend_on_earlier_answers(pool):
    """sympy's random numbers restart with every answer, and all processes have the same hash seed."""
    states = []
    for seed in (1, 2):
        sympy.core.random.seed(seed)
        builtin.math_answer(*calls(("\\boxed{x+1}", "1+x"))[0])
        states.append(sympy.core.random.rng.getstate())
    assert states[0] == states[1]
    graded(pool, [("\\boxed{1}", "1")], 5.0)
    assert b"PYTHONHASHSEED=0" in Path(f"/proc/{pool.processes[0].process.pid}/environ").read_bytes().split(b"\0")


def test_grading_processes_are_kept_light_and_replaced(pool):
    pool.processes = Graders(2).processes
    pairs = [(f"\\boxed{{{i}}}", "7") for i in range(30)]
    pids = []
    for _ in range(3):
        assert graded(pool, pairs, 5.0) == [i == 7 for i in range(30)]
        pids.append([p.process.pid for p in pool.processes])
        if len(pids) == 2:  # a dead idle process costs no answer
            os.kill(pids[0][0], signal.SIGKILL)
            assert until(lambda: pool.processes[0].process.poll() is not None, within=10)  # all of its threads
    assert pids[0] == pids[1] and len(pids[0]) == len(pids[2]) == 2 and pids[0][0] not in pids[2]
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in pids[2]]
    assert not any(name in text for text in maps for name in ("libtorch", "numpy"))
    assert pool.grade("math", [], 5.0) == []


def test_memory_is_bounded(pool):
    """An answer that needs more memory is wrong; the next answer is not affected."""
    large = "\\boxed{" + 200 * "0+" + "1}"
    assert graded(pool, [(large, "1")], 60.0) == [True]
    pid = pool.processes[0].process.pid
    assert resource.prlimit(pid, resource.RLIMIT_AS) == (grading.MEMORY, grading.MEMORY)
    pool.close()
    assert graded(pool, [("\\boxed{1}", "1")], 5.0) == [True]
    pid = pool.processes[0].process.pid
    used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (used, grading.MEMORY))
    first, second = graded(pool, [(large, "1"), ("\\boxed{2}", "2")], 60.0)
    assert first != 1.0 and second


def test_two_threads_share_the_processes(pool):
    pairs = [(f"\\boxed{{{i}}}", "7") for i in range(30)]
    results = {}
    threads = [threading.Thread(target=lambda i=i: results.update({i: graded(pool, pairs, 5.0)})) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] == results[1] == [i == 7 for i in range(30)]


def test_a_function_that_cannot_be_loaded_is_an_error(pool, tmp_path):
    path = tmp_path / "own.py"
    path.write_text("raise SystemExit('no')\n")
    with pytest.raises(ValueError, match="own.py:score: cannot be loaded .SystemExit: no .own.py, line 1..; fix the"):
        pool.grade(f"{path}:score", [({}, "x", "stop")], 5.0)


def test_an_edited_file_grades_as_before(pool, tmp_path):
    """A new process gets the version that the run began with."""
    path = tmp_path / "own.py"
    for reward in (1.0, 2.0):
        path.write_text(f"def score(row, text, finish_reason):\n    return {reward}\n")
        assert pool.grade(f"{path}:score", [({}, "x", "stop")], 5.0) == [1.0]
        pool.close()


def test_a_function_that_uses_the_alarm_has_a_limit(pool, tmp_path):
    """As math_verify does, which cancels the process's alarm."""
    path = tmp_path / "own.py"
    path.write_text(
        "import signal, time\ndef score(*args):\n    signal.alarm(9)\n    signal.alarm(0)\n    time.sleep(999)\n"
    )
    assert pool.grade(f"{path}:score", [({}, "x", "stop")], 0.1) == [None]


def test_programs_that_a_reward_started_end_with_a_killed_run(tmp_path):
    path = tmp_path / "own.py"
    path.write_text("import subprocess\ndef score(*args):\n    return subprocess.Popen(['sleep', '999']).pid\n")
    code = f"from tasks.grading import *; print(int(Graders(1).grade('{path}:score', [({{}}, 'x', 'stop')], 5.0)[0]), "
    code += "flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    pid = int(subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE).stdout)
    for _ in range(200):
        time.sleep(0.1 if alive(pid) else 0)
    assert not alive(pid)


def test_an_exception_during_grading_leaves_no_stale_answer(pool):
    """The next call does not get an answer of the interrupted call."""

    def stop(number, frame):
        raise LookupError

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        assert graded(pool, [("\\boxed{1}", "1")], 5.0) == [True]
        pid = pool.processes[0].process.pid
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(LookupError):
            graded(pool, [(TOWER, "1"), ("\\boxed{1}", "1")], 100.0)
        assert not alive(pid)
        assert graded(pool, [("\\boxed{1}", "2"), ("\\boxed{1}", "1")], 5.0) == [False, True]
    finally:
        signal.signal(signal.SIGUSR1, before)


INTERRUPTED = """
import os, random, signal, time
from tasks.grading import Graders

def boom(number, frame):
    if armed:
        raise LookupError

armed = False
signal.signal(signal.SIGALRM, boom)
pool = Graders(1)
pool.processes[0].values = lambda function, source, calls, seconds: time.sleep(0.0003) or [1.0] * len(calls)
rng = random.Random(0)
for _ in range(4000):
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 0.0012))
        pool.grade("letter", [1, 2, 3], 5.0)
        armed = False
    except Exception:  # KeyError: threading's own race
        armed = False
print("done", flush=True)
os._exit(0)
"""


def test_an_exception_of_a_signal_handler_blocks_no_thread():
    """Anywhere in `grade`, such as between a lock's acquisition and its `with` block."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=240
    )
    assert done.stdout == b"done\n"


GRADES = """
import signal, sys
from tasks.grading import Graders

for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: print("heard", flush=True))
pool = Graders(2)
pool.grade("math", [({"answer": i}, "\\\\boxed{%s}" % i, "stop") for i in "12"], 5.0)
print(*[p.process.pid for p in pool.processes], flush=True)
for _ in range(2):
    print(pool.grade("math", [({"answer": "1"}, sys.argv[1], "stop")], 1.5), flush=True)
"""


def test_signals_are_handled_while_an_answer_hangs():
    """Signals to all processes of a job: graders end only with their parent, a busy one at its answer's time limit."""
    process = subprocess.Popen([sys.executable, "-c", GRADES, TOWER], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(0.5)  # until the grader has the answer
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            for pid in (*pids, process.pid):
                os.kill(pid, number)
            assert process.stdout.readline() == "heard\n"
        assert process.stdout.readline() == "[None]\n"
        time.sleep(0.5)  # the second answer hangs
        assert process.poll() is None and any(map(alive, pids))
    finally:
        process.kill()
        process.communicate()
    assert until(lambda: not any(map(alive, pids)), within=60)


FORMATS = [
    (builtin.boxed, "so \\boxed{1}", True),
    (builtin.boxed, "\\boxed{1} \\boxed{1}", False),
    (builtin.boxed, "\\boxed{1", False),
    (builtin.think, "<think>a\nb</think> <answer>1</answer>\n", True),
    (builtin.think, "<think><think>a</think><answer>1</answer>", False),
    (builtin.think, "<answer>1</answer><think>a</think>", False),
]


@pytest.mark.parametrize("part, text, value", FORMATS)
def test_formats(part, text, value):
    assert part({"answer": "9"}, text, "stop") == value
    assert not builtin.boxed({"answer": "9"}, text, "length")


def problem(answer: str, **row) -> Problem:
    return Problem("x/0", "p", answer, {"answer": answer, **row})


def test_praxis_is_a_gate_and_a_bonus():
    """1 + min(tokens after the answer's line, N) / N, and 0 for responses that miss the gate."""
    texts = ("a b\n#### 7", "a b c d e\n#### 7\none two", "#### 7\n" + 50 * "w ", "#### 8\none two", "#### 7 #### 7")
    answers = [Answer(problem("7"), text, False, count=lambda text: len(text.split())) for text in texts]
    earned, counts = Reward(parts_of("praxis"), max_tokens=8).of(answers)
    assert earned == [1.0, 1.25, 2.0, 0.0, 0.0]
    assert counts == Counter({"answers": 5, "reward/praxis": 3, "reward/praxis_bonus": 1.25})


def test_a_sum_with_weights_and_a_penalty_of_length():
    """DAPO's Eq. 13: no penalty up to 100 - 20 tokens, then one twentieth a token. Parts with reward 0 are logged."""
    answers = [Answer(problem("7"), "\\boxed{7}", True, tokens) for tokens in (80, 85, 100)]
    answers.append(Answer(problem("7"), "\\boxed{8}", False, 60))
    reward = Reward(parts_of("math, boxed*0.5"), max_tokens=100, overlong=20)
    earned, counts = reward.of(answers)
    assert earned == [1.5, 1.25, 0.5, 0.0]
    parts = {"reward/math": 3, "reward/boxed": 3, "reward/overlong": -1.25}
    assert counts == Counter({"answers": 4, "plain": 4, **parts})
    logged = {"reward/math": 0, "reward/boxed": 0, "reward/overlong": 0}
    names = ("timeouts", "failures", "unboxed", "inexact")
    assert grading_metrics(reward.of(answers[3:])[1]) == {f"grade/{name}": 0 for name in names} | logged


OWN = """
import os, subprocess, sys, time, numpy as np
def score(row, text, finish_reason):
    return {"long": len(text) / row["n"], "cut": -1.0 * (finish_reason == "length")}

def sleeps(row, text, finish_reason):
    if text == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open(row["pids"], "a").write(f"{child.pid} ")
        time.sleep(600)
    return 1.0

def fails(row, text, finish_reason):
    return 1 / len(text)

def forks(row, text, finish_reason):
    if text == "hang":
        child = os.fork()  # it inherits all that is open here
        if child == 0:
            os.setsid()
            time.sleep(60)
            os._exit(0)
        open(row["pids"], "a").write(f"{child} ")
        os.waitpid(child, 0)
    return 1.0

def forks_once(row, text, finish_reason):
    if text == row["at"] and os.fork() == 0:
        return -1.0
    return float(text)

ends = lambda row, text, finish_reason: os._exit(4) if text == "end" else 1.0
killed = lambda row, text, finish_reason: os.kill(os.getpid(), 9) if text == "end" else 1.0
leaves = lambda row, text, finish_reason: sys.exit(3) if text == "end" else 1.0

def of_numpy(row, text, finish_reason):
    return {"half": np.float32(0.5), "yes": np.bool_(True), "two": np.int64(2)}

def returns(row, text, finish_reason):
    return {"": 1.0, "none": None, "nan": float("nan"), "text": "x", "list": {"a": [1]}}[text]
"""


@pytest.fixture
def custom(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return lambda name, **settings: Reward(parts_of(f"{path}:{name}"), **settings)


def test_a_custom_function_gets_its_row(custom):
    """Every column, the response, and the reason of its end; numbers of numpy are numbers."""
    answers = [Answer(problem("7", n=n), "four", finished) for n, finished in ((4, True), (8, True), (4, False))]
    answers = [replace(a, problem=replace(a.problem, id=f"x/{i}")) for i, a in enumerate(answers)]
    earned, counts = custom("score").of(answers)
    assert earned == [1.0, 0.5, 0.0]
    assert counts == Counter({"answers": 3, "reward/score/long": 2.5, "reward/score/cut": -1.0})
    earned, counts = custom("of_numpy").of([Answer(problem("7"), "x", True)])
    assert earned == [3.5] and counts["reward/of_numpy/half"] == 0.5 and counts["failures"] == 0


@pytest.mark.parametrize(
    "name, why",
    [("leaves", "SystemExit: 3 (own.py, line"), ("ends", "it ended its process (exit code 4)")]
    + [("killed", "it ended its process (SIGKILL)")],
)
def test_a_function_that_ends_its_process_fails_only_its_answer(custom, capsys, monkeypatch, pool, name, why):
    """The answer counts as a failure, not as a timeout, and the warning names the cause."""
    monkeypatch.setattr(rewards, "TOLD", set())
    earned, counts = custom(name).of([Answer(problem("7"), text, True) for text in ("a", "end", "b")])
    assert (earned, counts["failures"], counts["timeouts"]) == ([1.0, 0.0, 1.0], 1, 0)
    assert why in capsys.readouterr().err


def test_the_readmes_examples(tmp_path):
    """A reward and an environment run exactly as on the page."""
    reward_code, task_code = re.findall(r"```python\n(.*?)\n```\n", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "mine.py").write_text(reward_code)
    (tmp_path / "own_task.py").write_text(task_code)
    texts = ["so it is \\boxed{6}", "no", "6" * 500]
    answers = [Answer(problem("6"), text, True) for text in texts]
    reward = Reward(parts_of(f"{tmp_path / 'mine.py'}:score,math*0.5"))
    assert reward.of(answers)[0] == [1.5, 0.0, 0.0]
    task = make_task(SampleFlags(task=f"{tmp_path / 'own_task.py'}:Doubles", max_tokens=16))
    drawn = task.problem("train", 7)
    assert (drawn.answer, task.size) == ("14", None)
    assert task.rewards([Answer(drawn, text, True) for text in ("it is 14", "15")])[0] == [1.0, 0.0]


@pytest.mark.timeout(40)
@pytest.mark.parametrize("at", ["0", "7", "39"])
def test_a_child_that_a_reward_forks_answers_nothing(custom, at):
    """Each response has its own reward, twice over."""
    answers = [Answer(problem("", at=at), str(n), True) for n in range(40)]
    for _ in range(2):
        assert custom("forks_once").of(answers)[0] == [float(n) for n in range(40)]


@pytest.mark.parametrize("name", ["sleeps", "forks"])
def test_a_waiting_function_is_ended_with_its_child_processes(custom, tmp_path, pool, name):
    """The clock ends it and its child. A fork in a new session stays; its open connection blocks nothing."""
    answers = [Answer(problem("", pids=str(tmp_path / "pids")), text, True) for text in ("a", "hang", "b")]
    counts = Counter({"answers": 3, "timeouts": 1, f"reward/{name}": 2})
    assert custom(name, seconds=0.2).of(answers) == ([1.0, 0.0, 1.0], counts)
    pool.close()
    pid = int((tmp_path / "pids").read_text())
    if name == "forks":
        os.kill(pid, signal.SIGKILL)
    assert until(lambda: not alive(pid), within=10)


def test_a_function_that_raises_is_counted_and_reported_once(custom, capsys, monkeypatch):
    monkeypatch.setattr(rewards, "TOLD", set())
    answers = [Answer(problem("7"), text, True) for text in ("", "ab", "")]
    for _ in range(2):
        earned, counts = custom("fails").of(answers)
        assert earned == [0.0, 0.5, 0.0] and counts == Counter({"answers": 3, "failures": 2, "reward/fails": 0.5})
    printed = capsys.readouterr().err
    assert printed.count("ZeroDivisionError: division by zero (own.py, line 14); such a response earns 0") == 1
    texts = ("", "none", "nan", "text", "list", "nosuch")
    earned, counts = custom("returns").of([Answer(problem("7"), text, True) for text in texts])
    assert earned == [1.0, 0, 0, 0, 0, 0] and counts["failures"] == 5
    assert capsys.readouterr().err.count("warning: ") == 1  # for five causes


def test_a_function_is_called_before_a_model_loads(tmp_path):
    """When the task is made, on the first problem with its answer as the response."""
    (tmp_path / "own.py").write_text("def score(row, text, finish_reason):\n    return 1 / (int(text) - 7)\n")
    (tmp_path / "x.jsonl").write_text('{"problem": "p", "answer": "7"}\n')
    cfg = SampleFlags(task=str(tmp_path / "x.jsonl"), reward=f"{tmp_path / 'own.py'}:score", max_tokens=16)
    with pytest.raises(ValueError, match="own.py:score: on the first problem with the answer as response: ZeroDiv"):
        make_task(cfg)
