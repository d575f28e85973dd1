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
from tasks import Answer, Problem, Table, builtin, grading, grading_metrics, make_task, read_rows, rewards
from tasks.builtin import last_box
from tasks.grading import Graders, graders
from tasks.prompts import Style
from tasks.rewards import Reward, parts_of


def calls(*pairs) -> list[tuple]:
    """(response, gold answer) pairs as calls of a built-in reward."""
    return [({"answer": gold}, response, "stop") for response, gold in pairs]


def graded(pool, pairs, seconds: float) -> list:
    return pool.grade("math", calls(*pairs), seconds)


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
    assert builtin.math_answer(*calls((response, answer))[0])


def test_a_table_of_graded_responses():
    """127 pairs of a gold answer and a response, labelled by hand: at most 2 % may be graded differently."""
    pairs = [json.loads(line) for line in (ROOT / "tests" / "graded.jsonl").read_text(encoding="utf-8").splitlines()]
    wrong = []
    for name in ("math", "gsm8k"):
        rows = [row for row in pairs if row["reward"] == name]
        asked = [Answer(Problem(str(i), "p", row["gold"]), row["response"], True) for i, row in enumerate(rows)]
        values = rewards.Reward(parts=rewards.parts_of(name)).values(rewards.Part(name, 1.0), asked)
        wrong += [row for row, value in zip(rows, values, strict=True) if bool(value) != row["right"]]
    assert len(pairs) >= 120 and len(wrong) <= 0.02 * len(pairs), wrong


@pytest.mark.parametrize("response, answer", WRONG)
def test_wrong_answers(response, answer):
    assert not builtin.math_answer(*calls((response, answer))[0])


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
def test_only_the_last_box_counts(text, inside):
    assert last_box(text) == (None if inside is None else f"\\boxed{{{inside}}}")


# ---------------------------------------------------------------------------------------------------------------------
# Grading processes. Evaluating the power tower never returns: the number has more digits than there are atoms
# ---------------------------------------------------------------------------------------------------------------------

TOWER = "\\boxed{9^{9^{9^9}}}"


def math_task(tmp_path, *answers, **settings) -> Table:
    path = tmp_path / "math.jsonl"
    path.write_text("".join(json.dumps({"problem": "p", "answer": a}) + "\n" for a in answers))
    return Table(str(path), read_rows(str(path)), Style(), Reward(**settings))


def answers_of(task, *texts) -> list[Answer]:
    """Answers to the task's first problem with these texts."""
    return [Answer(task.problem("test", 0), text, True) for text in texts]


def alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_an_endless_answer_fails_alone(tmp_path):
    """Answers in the same chunk are graded, and an equal endless answer is not tried again."""
    task = math_task(tmp_path, "5", seconds=0.5)
    answers = answers_of(
        task, "\\boxed{5}", TOWER, "\\boxed{5.0}", "\\boxed{6}", TOWER, "5", *(f"\\boxed{{{i}}}" for i in range(40))
    )
    start = time.monotonic()
    rewards, counts = task.rewards(answers)
    assert time.monotonic() - start < 60
    assert rewards[:6] == [1, 0, 1, 0, 0, 0]
    assert rewards[6:] == [float(i == 5) for i in range(40)]
    assert counts == Counter({"answers": 46, "timeouts": 2, "unboxed": 1, "reward/math": 3, "plain": 46, "exact": 4})


def test_equal_answers_are_graded_once(tmp_path, monkeypatch):
    """An answer without a box is not graded at all."""
    task = math_task(tmp_path, "5", "6", seconds=3.0)
    calls_made = []

    class Watched(Graders):
        def grade(self, function, calls, seconds):
            calls_made.append((function, calls, seconds))
            return super().grade(function, calls, seconds)

    pool = Watched(1)
    monkeypatch.setattr(rewards, "graders", lambda: pool)
    texts = ("so \\boxed{5}", "\\boxed{5}.", "none", "\\boxed{6}")
    answers = [Answer(task.problem("test", i), text, True) for i in (0, 1) for text in texts]
    try:
        assert task.rewards(answers) == (
            [1, 1, 0, 0, 0, 0, 0, 1],
            Counter({"answers": 8, "unboxed": 2, "reward/math": 3, "plain": 8, "exact": 3}),
        )
    finally:
        pool.close()
    pairs = [(f"\\boxed{{{text}}}", gold) for gold in "56" for text in "56"]
    assert calls_made == [("math", calls(*pairs), 3.0)]


def test_verdicts_do_not_depend_on_earlier_answers():
    """sympy's random numbers restart with every answer, and all processes have the same hash seed."""
    states = []
    for seed in (1, 2):
        sympy.core.random.seed(seed)
        builtin.math_answer(*calls(("\\boxed{x+1}", "1+x"))[0])
        states.append(sympy.core.random.rng.getstate())
    assert states[0] == states[1]
    pool = Graders(1)
    try:
        graded(pool, [("\\boxed{1}", "1")], 5.0)
        assert b"PYTHONHASHSEED=0" in Path(f"/proc/{pool.processes[0].process.pid}/environ").read_bytes().split(b"\0")
    finally:
        pool.close()


def test_the_answer_is_in_the_last_box(tmp_path):
    texts = (
        "\\boxed{5}",
        "it is 5",
        "\\boxed{4} no, \\boxed{5}",
        "\\boxed{5} no, \\boxed{4}",
        "\\boxed{5} so \\boxed{5",
        "?",
    )
    task = math_task(tmp_path, "5")
    assert task.rewards(answers_of(task, *texts)) == (
        [1, 0, 1, 0, 0, 0],
        Counter({"answers": 6, "unboxed": 3, "reward/math": 2, "plain": 6, "exact": 4}),
    )


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
        assert graded(pool, pairs, 5.0) == wanted
        first = [p.process.pid for p in pool.processes]
        assert len(first) == 2
        assert not any(name in Path(f"/proc/{pid}/maps").read_text() for pid in first for name in ("libtorch", "numpy"))
        assert graded(pool, pairs, 5.0) == wanted
        assert [p.process.pid for p in pool.processes] == first
        os.kill(first[0], signal.SIGKILL)
        assert until(lambda: not alive(first[0]), within=10)
        assert graded(pool, pairs, 5.0) == wanted  # a dead idle process costs no answer
        assert pool.grade("math", [], 5.0) == []
        assert first[0] not in [p.process.pid for p in pool.processes] and len(pool.processes) == 2
    finally:
        pool.close()


def kill_when_busy(pid: int) -> None:
    """Kill a process after another second of processor time; no short answer takes as long."""
    used = lambda: sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))  # noqa: E731
    start = used()
    assert until(lambda: used() - start > os.sysconf("SC_CLK_TCK"), within=90)
    os.kill(pid, signal.SIGSEGV)


def test_a_dead_process_loses_only_its_answer():
    """Death by a fault in a library, or by the kernel out of memory."""
    pool = Graders(1)
    lost = grading.Failure("it ended its process (exit code -11)")
    try:
        assert graded(pool, [("\\boxed{1}", "1")], 5.0) == [True]
        pid = pool.processes[0].process.pid
        threading.Thread(target=kill_when_busy, args=(pid,), daemon=True).start()
        assert graded(pool, [("\\boxed{1}", "1"), (TOWER, "1"), ("\\boxed{2}", "2")], 100.0) == [True, lost, True]
    finally:
        pool.close()


def test_a_suspended_process_is_replaced(monkeypatch):
    monkeypatch.setattr(grading, "SILENCE", 1.0)
    pool = Graders(1)
    try:
        while not pool.processes or not pool.processes[0].ready:  # its start may take longer on a busy machine
            graded(pool, [("\\boxed{1}", "1")], 5.0)
        os.kill(pool.processes[0].process.pid, signal.SIGSTOP)
        assert graded(pool, [("\\boxed{1}", "1"), ("\\boxed{2}", "2")], 0.3) == [None, True]
    finally:
        pool.close()


def test_memory_is_bounded():
    """An answer that needs more memory is wrong; the next answer is not affected."""
    pool = Graders(1)
    large = "\\boxed{" + 200 * "0+" + "1}"
    try:
        assert graded(pool, [("\\boxed{1}", "1")], 5.0) == [True]
        pid = pool.processes[0].process.pid
        assert resource.prlimit(pid, resource.RLIMIT_AS) == (grading.MEMORY, grading.MEMORY)
        used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(pid, resource.RLIMIT_AS, (used, grading.MEMORY))
        first, second = graded(pool, [(large, "1"), ("\\boxed{2}", "2")], 60.0)
        assert first != 1.0 and second
        pool.close()
        assert graded(pool, [(large, "1")], 60.0) == [True]
    finally:
        pool.close()


def test_processes_that_cannot_start_are_an_error(monkeypatch):
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    pool = Graders(1)
    with pytest.raises(RuntimeError, match="grading processes end before they are ready .exit code 1."):
        graded(pool, [("\\boxed{1}", "1")], 5.0)
    assert pool.processes == []


def test_an_exception_during_grading_leaves_no_stale_answer():
    """The next call does not get an answer of the interrupted call."""

    class StopError(Exception):
        pass

    def stop(number, frame):
        raise StopError

    before = signal.signal(signal.SIGUSR1, stop)
    pool = Graders(1)
    try:
        assert graded(pool, [("\\boxed{1}", "1")], 5.0) == [True]
        pid = pool.processes[0].process.pid
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(StopError):
            graded(pool, [(TOWER, "1"), ("\\boxed{1}", "1")], 100.0)
        assert not alive(pid)
        assert graded(pool, [("\\boxed{1}", "2"), ("\\boxed{1}", "1")], 5.0) == [False, True]
    finally:
        pool.close()
        signal.signal(signal.SIGUSR1, before)


GRADES = """
import signal, sys, threading, time
from tasks.grading import Graders

for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: print("heard", flush=True))
pool = Graders(2)
pool.grade("math", [({"answer": i}, "\\\\boxed{%s}" % i, "stop") for i in "12"], 5.0)
print(*[p.process.pid for p in pool.processes], flush=True)
print(pool.grade("math", [({"answer": "1"}, r"TOWER", "stop")], float(sys.argv[1])), flush=True)
"""


def hanging(seconds: float):
    """A process with two graders, one of them with an endless answer; and the graders' process ids."""
    code = GRADES.replace("TOWER", TOWER)
    process = subprocess.Popen([sys.executable, "-c", code, str(seconds)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(1.0)  # until the grader has the answer
    return process, pids


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_handled_while_an_answer_hangs(number):
    """A scheduler or a keyboard sends signals to all processes of a job; the graders continue."""
    process, pids = hanging(3.0)
    try:
        for pid in (*pids, process.pid):
            os.kill(pid, number)
        assert process.stdout.readline() == "heard\n"
        time.sleep(0.5)  # a process that dies of the signal is dead by now
        assert process.poll() is None and all(map(alive, pids))
        assert process.stdout.readline() == "[None]\n"
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def test_graders_end_with_their_parent():
    """The idle grader ends immediately, the busy grader at its answer's time limit."""
    process, pids = hanging(3.0)
    process.kill()
    process.communicate()
    assert until(lambda: not any(map(alive, pids)), within=60)


def test_a_forked_process_starts_new_grading_processes():
    """The parent's grading processes are not the fork's children, and they read from the parent."""
    assert graded(graders(), RIGHT[:2], 5) == [1.0, 1.0]
    started = [p.process.pid for p in graders().processes]
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)
            values = graded(graders(), [RIGHT[0], WRONG[0], RIGHT[2]], 5)
            status = int(values != [1.0, 0.0, 1.0])
            graders().close()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert graded(graders(), [WRONG[0], RIGHT[1]], 5) == [0.0, 1.0]
    assert [p.process.pid for p in graders().processes] == started


def test_graders_are_divided_among_the_ranks_of_a_host(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    sizes = []
    for ranks in ("1", "4", "24"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        sizes.append(graders.__wrapped__().size)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert [*sizes, graders.__wrapped__().size] == [12, 3, 1, 12]
    assert graders() is graders()


# ---------------------------------------------------------------------------------------------------------------------
# More built-in rewards
# ---------------------------------------------------------------------------------------------------------------------

CASES = {
    "gsm8k": [
        ("1,200", "so\n#### 1200", 1),
        ("1200", "#### $1,200.", 1),
        ("7", "#### 5 no\n#### 7", 1),
        ("7", "#### 7 no\n#### 5", 0),
        ("7", "7", 0),
        ("-3", "####-3", 1),
        ("3", "#### -3", 0),
        ("70", "#### 7", 0),
        ("0.5", "#### .5", 1),
    ],
    "praxis": [
        ("7", "#### 7\nbecause", 1),
        ("7", "#### 7\n#### 7", 0),
        ("7", "\\boxed{7}", 0),
        ("7", "#### 8\nwhy", 0),
    ],
    "letter": [
        ("B", "\\boxed{B}", 1),
        ("B", "\\boxed{\\text{(B)}}", 1),
        ("B", "\\boxed{\\mathrm{b}}", 1),
        ("B", "\\boxed{\\textbf{B}}", 1),
        ("B", "\\boxed{\\textbf{(B)}}", 1),
        ("B", "\\boxed{\\mathit{B}}", 1),
        ("B", "\\boxed{\\boldsymbol{B}}", 1),
        ("B", "\\boxed{B. Paris}", 1),
        ("B", "\\boxed{Berlin}", 0),
        ("B", "not \\boxed{A}", 0),
        ("B", "The answer is (B).", 1),
        ("B", "Answer: **B**", 1),
        ("B", "the answer is A, no, the answer is B", 1),
        ("B", "the answer is B, no, the answer is A", 0),
        ("B", "B", 0),
        ("B", "The answer is Because", 0),
        ("B", "The answer is B. To get this answer I used a table", 1),
        ("B", "**Answer:** B", 1),
        ("B", "**Answer**: B", 1),
        ("B", "ANSWER: B", 1),
        ("B", "Final Answer: $B$", 1),
        ("B", "The answer is: \\(B\\)", 1),
        ("B", "The answer is \\textbf{(B)}", 1),
        ("B", "The answer is option B", 1),
        ("A", "The answer is not A", 0),
        ("B", "\\boxed{$B$}", 1),
        ("B", "\\boxed{\\,B}", 1),
        ("B", "\\boxed{\\text{Option B}}", 1),
        ("B", "\\boxed{\\text{Orange}}", 0),
    ],
    "boxed": [("9", "so \\boxed{1}", 1), ("9", "\\boxed{1} \\boxed{1}", 0), ("9", "\\boxed{1", 0), ("9", "1", 0)],
    "think": [
        ("9", "<think>a\nb</think> <answer>1</answer>\n", 1),
        ("9", "<think>a</think>1", 0),
        ("9", "x<think>a</think><answer>1</answer>", 0),
        ("9", "<think><think>a</think><answer>1</answer>", 0),
        ("9", "<answer>1</answer><think>a</think>", 0),
    ],
}


@pytest.mark.parametrize("name, answer, text, value", [(name, *case) for name in CASES for case in CASES[name]])
def test_built_in_parts(name, answer, text, value):
    assert rewards.BUILT_IN[name]({"answer": answer}, text, "stop") == value


def test_a_cut_response_is_not_boxed():
    assert not builtin.boxed({"answer": "1"}, "\\boxed{1}", "length")


def problem(answer: str, **row) -> Problem:
    return Problem("x/0", "p", answer, {"answer": answer, **row})


def words(text: str) -> int:
    return len(text.split())


def test_praxis_is_a_gate_and_a_bonus():
    """1 + min(tokens after the answer's line, N) / N, and 0 for responses that miss the gate."""
    texts = ("a b\n#### 7", "a b c d e\n#### 7\none two", "#### 7\n" + 50 * "w ", "#### 8\none two", "#### 7 #### 7")
    answers = [Answer(problem("7"), text, False, words(text), words) for text in texts]
    earned, counts = Reward(parts_of("praxis"), max_tokens=8).of(answers)
    assert earned == [1.0, 1.25, 2.0, 0.0, 0.0]
    assert counts == Counter({"answers": 5, "reward/praxis": 3, "reward/praxis_bonus": 1.25})


def test_a_sum_with_weights_and_a_penalty_of_length():
    """DAPO's Eq. 13: no penalty up to 100 - 20 tokens, then one twentieth a token, 1 at the limit."""
    answers = [Answer(problem("7"), "\\boxed{7}", True, tokens) for tokens in (80, 85, 100)]
    answers.append(Answer(problem("7"), "\\boxed{8}", False, 60))
    earned, counts = Reward(parts_of("math, boxed*0.5"), max_tokens=100, overlong=20).of(answers)
    assert earned == [1.5, 1.25, 0.5, 0.0]
    parts = {"reward/math": 3, "reward/boxed": 3, "reward/overlong": -1.25}
    assert counts == Counter({"answers": 4, "plain": 4, "exact": 3, **parts})


# ---------------------------------------------------------------------------------------------------------------------
# Custom rewards
# ---------------------------------------------------------------------------------------------------------------------

OWN = '''
import os, subprocess, sys, time, numpy as np
from dataclasses import dataclass

LOADED = time.time()

@dataclass
class Case:
    program: str
    value: int

def score(row, text, finish_reason):
    return {"long": len(text) / row["n"], "cut": -1.0 * (finish_reason == "length")}

def runs(row, text, finish_reason):
    """Does the code in the response pass the row's tests?"""
    done = subprocess.run([sys.executable, "-c", text + "\\n" + row["tests"]], capture_output=True, timeout=30)
    return done.returncode == 0

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
            if row["session"]:
                os.setsid()
            time.sleep(60)
            os._exit(0)
        open(row["pids"], "a").write(f"{child} ")
        os.waitpid(child, 0)
    return 1.0

def forks_once(row, text, finish_reason):
    n = int(text)
    if n == row["at"] and os.fork() == 0:
        if row["how"] == "raise":
            raise ValueError("in the child")
        if row["how"] == "exit":
            sys.exit(0)
        return -1.0
    return float(n)

def leaves_a_fork(row, text, finish_reason):
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    open(row["pids"], "a").write(f"{child} {os.getpid()} ")
    return 1.0

def interrupts(row, text, finish_reason):
    raise KeyboardInterrupt


def ends(row, text, finish_reason):
    import os
    os._exit(4)


def leaves(row, text, finish_reason):
    sys.exit(3)

def of_numpy(row, text, finish_reason):
    return {"half": np.float32(0.5), "yes": np.bool_(True), "two": np.int64(2)}

def returns(row, text, finish_reason):
    return {"": 1.0, "none": None, "nan": float("nan"), "text": "x", "list": {"a": [1]}}[text]
'''


@pytest.fixture
def custom(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return lambda name, **settings: Reward(parts_of(f"{path}:{name}"), **settings)


def test_a_custom_function_gets_its_row(custom):
    """Every column, the response, and the reason of its end."""
    answers = [Answer(problem("7", n=n), "four", finished) for n, finished in ((4, True), (8, True), (4, False))]
    answers = [replace(a, problem=replace(a.problem, id=f"x/{i}")) for i, a in enumerate(answers)]
    earned, counts = custom("score").of(answers)
    assert earned == [1.0, 0.5, 0.0]
    assert counts == Counter({"answers": 3, "reward/score/long": 2.5, "reward/score/cut": -1.0})


def test_numbers_of_numpy_are_numbers(custom):
    earned, counts = custom("of_numpy").of([Answer(problem("7"), "x", True)])
    assert earned == [3.5] and counts["reward/of_numpy/half"] == 0.5 and counts["failures"] == 0


@pytest.mark.parametrize(
    "name, why",
    [
        ("leaves", "SystemExit: 3 (own.py, line"),
        ("interrupts", "KeyboardInterrupt:  (own.py, line"),
        ("ends", "it ended its process (exit code 4)"),
    ],
)
def test_a_function_that_ends_its_process_fails_only_its_answer(custom, capsys, monkeypatch, name, why):
    """The answer counts as a failure, not as a timeout, and the warning names the cause."""
    monkeypatch.setattr(rewards, "TOLD", set())
    earned, counts = custom(name).of([Answer(problem("7"), "x", True)])
    assert (earned, counts["failures"], counts["timeouts"]) == ([0.0], 1, 0)
    assert why in capsys.readouterr().err


def test_code_in_a_response_runs_against_the_rows_tests(custom):
    row = {"tests": "assert double(3) == 6"}
    texts = ("def double(x): return 2 * x", "def double(x): return x", "def double(x: return", "while True: pass")
    answers = [Answer(problem("", **row), text, True) for text in texts[:3]]
    assert custom("runs", seconds=20.0).of(answers)[0] == [1.0, 0.0, 0.0]


def test_parts_with_reward_0_are_logged():
    answers = [Answer(problem("7"), "\\boxed{8}", False, tokens) for tokens in (90, 100)]
    _, counts = Reward(parts_of("math,boxed*0.5"), max_tokens=100, overlong=20).of(answers)
    assert grading_metrics(counts) == {
        "grade/timeouts": 0,
        "grade/failures": 0,
        "grade/unboxed": 0,
        "grade/exact": 0,
        "grade/inexact": 0,
        "reward/math": 0,
        "reward/boxed": 0,
        "reward/overlong": -0.75,
    }


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


def test_a_waiting_function_is_ended_with_its_child_processes(custom, tmp_path, monkeypatch):
    """The function uses no processor time, so the clock ends it and its child; its neighbours are graded."""
    monkeypatch.setattr(grading, "PATIENCE", 6)
    pool = Graders(1)
    monkeypatch.setattr(rewards, "graders", lambda: pool)
    try:
        row = {"pids": str(tmp_path / "pids")}
        answers = [Answer(problem("", **row), text, True) for text in ("a", "hang", "b")]
        assert custom("sleeps", seconds=0.5).of(answers) == (
            [1.0, 0.0, 1.0],
            Counter({"answers": 3, "timeouts": 1, "reward/sleeps": 2}),
        )
    finally:
        pool.close()
    (pid,) = (tmp_path / "pids").read_text().split()
    assert until(lambda: not alive(int(pid)), within=10)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("session", [False, True])
def test_a_fork_that_outlives_its_process_does_not_block(custom, tmp_path, monkeypatch, session):
    """The fork keeps the connection open; it ends with its process unless it started a new session."""
    monkeypatch.setattr(grading, "PATIENCE", 4)
    pool, start = Graders(1), time.monotonic()
    monkeypatch.setattr(rewards, "graders", lambda: pool)
    row = {"pids": str(tmp_path / "pids"), "session": session}
    try:
        answers = [Answer(problem("", **row), text, True) for text in ("a", "hang", "b")]
        assert custom("forks", seconds=0.5).of(answers)[0] == [1.0, 0.0, 1.0]
        assert time.monotonic() - start < 40
    finally:
        pool.close()
        (pid,) = map(int, (tmp_path / "pids").read_text().split())
        if session:
            os.kill(pid, signal.SIGKILL)
    assert session or until(lambda: not alive(pid), within=10)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ["return", "exit", "raise"])
@pytest.mark.parametrize("at", [0, 7, 39])
def test_a_forked_child_of_a_reward_sends_no_answer(custom, how, at):
    """For every end of the child, each response has its reward, in two calls."""
    answers = [Answer(problem("", at=at, how=how), str(n), True) for n in range(40)]
    for _ in range(2):
        assert custom("forks_once", seconds=5.0).of(answers)[0] == [float(n) for n in range(40)]


@pytest.mark.timeout(60)
def test_a_process_that_died_idle_with_a_fork_is_replaced(custom, tmp_path, monkeypatch):
    """The fork keeps the connection open, so the connection does not show the death."""
    pool = Graders(1)
    monkeypatch.setattr(rewards, "graders", lambda: pool)
    answer = Answer(problem("", pids=str(tmp_path / "pids")), "a", True)
    pids = []
    try:
        assert custom("leaves_a_fork", seconds=5.0).of([answer])[0] == [1.0]
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        os.kill(pids[1], signal.SIGKILL)
        pool.processes[0].process.wait()
        assert custom("score").of([Answer(problem("7", n=4), "four", True)])[0] == [1.0]
    finally:
        pool.close()
        for pid in pids[:1]:
            os.kill(pid, signal.SIGKILL)


def test_a_function_that_raises_is_counted_and_reported_once(custom, capsys, monkeypatch):
    monkeypatch.setattr(rewards, "TOLD", set())
    answers = [Answer(problem("7"), text, True) for text in ("", "ab", "")]
    for _ in range(2):
        assert custom("fails").of(answers) == (
            [0.0, 0.5, 0.0],
            Counter({"answers": 3, "failures": 2, "reward/fails": 0.5}),
        )
    printed = capsys.readouterr().err
    assert printed.count("ZeroDivisionError: division by zero (own.py, line 28); such a response earns 0") == 1
    texts = ("", "none", "nan", "text", "list", "nosuch")
    earned, counts = custom("returns").of([Answer(problem("7"), text, True) for text in texts])
    assert earned == [1.0, 0, 0, 0, 0, 0] and counts["failures"] == 5
    assert capsys.readouterr().err.count("warning: ") == 1  # for five causes


@pytest.mark.parametrize(
    "name, sentence",
    [
        (
            "nosuch",
            "own.py:nosuch: cannot be loaded .AttributeError: module 'user_own' has no attribute 'nosuch'.; fix",
        ),
        ("fails", "own.py:fails: on the first problem with the answer as response: ZeroDivisionError"),
        ("returns", "own.py:returns: on the first problem with the answer as response: KeyError"),
    ],
)
def test_a_function_is_called_before_a_model_loads(custom, name, sentence):
    answer = Answer(problem("" if name == "fails" else "7"), "" if name == "fails" else "7", True)
    with pytest.raises(ValueError, match=sentence):
        rewards.try_out(custom(name), answer)
    rewards.try_out(custom("score"), Answer(problem("7", n=2), "7", True))


def test_a_file_that_ends_its_process_is_an_error(tmp_path):
    path = tmp_path / "own.py"
    path.write_text("import os\nos._exit(3)\n")
    pool = Graders(1)
    with pytest.raises(RuntimeError, match="grading processes end before they are ready .exit code 3."):
        pool.grade(f"{path}:score", [({}, "x", "stop")], 5.0)
    path.write_text("raise SystemExit('no')\n")
    with pytest.raises(ValueError, match="own.py:score: cannot be loaded .SystemExit: no .own.py, line 1..; fix the"):
        pool.grade(f"{path}:score", [({}, "x", "stop")], 5.0)


@pytest.mark.parametrize(
    "text, sentence",
    [
        (
            "mth",
            "--reward=mth: not one of math, gsm8k, praxis, letter, boxed, think, FILE.py:FUNCTION; did you mean math?",
        ),
        ("math*x", r"--reward=math\*x: x is not a weight; write NAME\*0.5"),
        ("math*inf", "inf is not a weight"),
        ("math,math", "--reward=math,math: the same part is named twice"),
        ("conftest.py:f,oracle.py:f", "the same part is named twice; leave one part out, or rename its function"),
        ("no.py:f", "--reward=no.py:f: no.py: no such file; write FILE.py:FUNCTION"),
        ("conftest.py:", "--reward=conftest.py:: no function is named; write conftest.py:FUNCTION"),
    ],
)
def test_bad_rewards(text, sentence, monkeypatch):
    monkeypatch.chdir(ROOT / "tests")
    with pytest.raises(ValueError, match=sentence):
        parts_of(text)
