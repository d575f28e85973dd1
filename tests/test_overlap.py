"""Grading while vLLM decodes: the order of events, results equal to grading at the end, exceptions and signals."""

import json
import os
import signal
import threading
from collections import Counter
from types import SimpleNamespace
from unittest.mock import Mock, call

import numpy as np
import pytest
from test_rollout import flat, same_tokens

from config import SampleFlags
from machinery.flags import UserError
from model.engines import HFEngine, VLLMEngine
from sampling import Sampling
from source import LocalSource
from tasks import grade_all, make_task, rewards
from tasks.arith import arithmetic_tokenizer
from tasks.grading import Graders, graders

STOP = list(range(1, 256, 12))  # responses of different lengths
OWN = """
import time
print("loaded", file=open(__file__ + ".log", "a"))
def third(row, text, finish_reason):
    return len(text) / 3 if len(text) % 4 else 1 / 0
def seventh(row, text, finish_reason):
    return {"part": len(text) / 7, "n": int(row["answer"])}
def hangs(row, text, finish_reason):
    if text == row["answer"]:  # the trial before a run
        return 0.0
    print("hangs", file=open(__file__ + ".log", "a"))
    time.sleep(600)
"""


@pytest.fixture
def task(tmp_path):
    """A function: a task of four problems with a reward."""
    (tmp_path / "own.py").write_text(OWN)
    rows = [{"problem": f"{n} + {n} :", "answer": str(2 * n)} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path = f"{tmp_path / 'own.py'}"
    return lambda *names: make_task(
        SampleFlags(
            task=f"{tmp_path / 'rows.jsonl'}", reward=",".join(f"{path}:{name}" for name in names), max_tokens=40
        )
    )


def source_of(engine, task) -> LocalSource:
    settings = dict(group_size=4, topk=3, model="actor", check=None, stop_ids=STOP)
    return LocalSource(engine, task, arithmetic_tokenizer(), Sampling(max_tokens=40, seed=3), **settings)


class Pieces(HFEngine):
    """An engine that hands over the first response, calls `between`, and hands over the rest."""

    def generate(self, *args, finished=None):
        groups = super().generate(*args)
        pairs = [(i, r) for i, group in enumerate(groups) for r in group]
        finished(pairs[:1])
        self.between()
        finished(pairs[1:])
        return groups


def check_results(source, monkeypatch) -> None:
    """Rewards and counts of four groups against grading at the end. The main thread calls no reward function."""
    calls = watch_grading(monkeypatch)[1]
    groups = source.next(4, 0)
    assert calls[True] == 0 < calls[False]
    monkeypatch.undo()
    prompts, seeds = [g.prompt_ids for g in groups], [source.seeds(g.uid) for g in groups]
    problems = [source.task.problem("train", i) for i in range(4)]
    source.engine.between = lambda: None
    again = source.engine.generate(prompts, seeds, source.sampling, 3, STOP, finished=lambda ended: None)
    counts = grade_all(source.task, source.tokenizer, problems, again)
    responses = flat(g.responses for g in groups)
    assert all(same_tokens(a, b) for a, b in zip(flat(again), responses, strict=True))
    assert [r.reward for r in flat(again)] == [r.reward for r in responses]
    assert len({r.reward for r in responses}) > 2 and len({len(r.tokens) for r in responses}) > 2
    assert source.counts == counts + Counter(sampled=len(responses)) and counts["failures"] > 0


def watch_grading(monkeypatch) -> tuple[threading.Event, Counter]:
    """An event that the first call of a reward function sets, and the number of calls by thread."""
    started, calls, grade = threading.Event(), Counter(), Graders.grade

    def watched(self, function, todo, seconds):
        calls[threading.current_thread() is threading.main_thread()] += len(todo)
        started.set()
        return grade(self, function, todo, seconds)

    monkeypatch.setattr(Graders, "grade", watched)
    return started, calls


def test_the_first_response_is_graded_before_the_last_ends(folders, task, monkeypatch):
    engine = Pieces(str(folders / "actor"))
    source = source_of(engine, task("third", "seventh"))
    started, _ = watch_grading(monkeypatch)
    engine.between = lambda: pytest.fail("grading has not begun") if not started.wait(30) else None
    check_results(source, monkeypatch)


def test_vllm_decodes_while_responses_are_graded(vllm_engine, task, monkeypatch):
    """The second step with an ended response starts only after the grading of the first."""
    source, core = source_of(vllm_engine, task("third", "seventh")), vllm_engine.llm.llm_engine
    (started, _), step, ended = watch_grading(monkeypatch), core.step, []

    def waiting():
        assert not ended or started.wait(30), "grading has not begun"
        outputs = step()
        ended.extend([len(outputs)] if outputs else [])
        return outputs

    monkeypatch.setattr(core, "step", waiting)
    check_results(source, monkeypatch)
    assert len(ended) > 2 and sum(ended) == 16


def test_equal_answers_are_graded_once_in_all(folders, task, monkeypatch):
    engine = Pieces(str(folders / "actor"))
    source = source_of(engine, task("seventh"))
    source.seeds = lambda uid: [7] * 4
    calls = watch_grading(monkeypatch)[1]
    engine.between = lambda: None
    source.next(4, 0)
    assert calls == {False: 4, True: 0}


def test_each_process_loads_a_file_once_for_each_function(task, monkeypatch, tmp_path):
    pool = Graders(1)
    monkeypatch.setattr(rewards, "graders", lambda: pool)
    call_of = [({"answer": "1"}, "abc", "stop")]
    for name in ("third", "seventh", "third", "seventh"):
        pool.grade(f"{tmp_path / 'own.py'}:{name}", call_of, 5.0)
    pool.close()
    assert (tmp_path / "own.py.log").read_text().count("loaded") == 2


def test_an_exception_of_the_thread_reaches_the_caller(folders, task, monkeypatch, tmp_path):
    """After it other groups can be sampled."""
    engine = Pieces(str(folders / "actor"))
    source = source_of(engine, task("seventh"))
    engine.between = lambda: None
    grade = Graders.grade

    def fails(self, *args):
        if threading.current_thread() is not threading.main_thread():
            raise UserError("from the thread")
        return grade(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Graders, "grade", fails)
        with pytest.raises(UserError, match="from the thread"):
            source.next(4, 0)
    assert len({r.reward for r in flat(g.responses for g in source.next(4, 0))}) > 2


@pytest.mark.timeout(45)  # below the time limit of an answer that hangs, 50 s
@pytest.mark.parametrize("decoding", [True, False])
def test_a_signal_ends_decoding_and_grading(decoding, folders, task, tmp_path):
    """While the engine decodes, and while the source waits for the last grades, with a reward that hangs."""

    def stop(number, frame):
        raise LookupError

    def interrupt():
        while not (tmp_path / "own.py.log").exists() or "hangs" not in (tmp_path / "own.py.log").read_text():
            asleep.wait(0.05)
        os.kill(os.getpid(), signal.SIGUSR1)

    asleep, engine = threading.Event(), Pieces(str(folders / "actor"))
    engine.between = lambda: asleep.wait(60 if decoding else 0)
    before = signal.signal(signal.SIGUSR1, stop)
    try:
        waiter = threading.Thread(target=interrupt)
        waiter.start()
        with pytest.raises(LookupError):
            source_of(engine, task("hangs")).next(4, 0)
        waiter.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not any(grader.process and grader.process.poll() is None for grader in graders().processes)
    engine.between = lambda: None
    assert len(source_of(engine, task("seventh")).next(4, 0)) == 4


# -- the engine's part, with a stand-in for vLLM ----------------------------------------------------------------------


def output(name: str, *tokens: int):
    """An output of vLLM with these tokens."""
    rows = [np.array([[token, token]]) for token in tokens]
    logprobs = SimpleNamespace(token_ids=rows, logprobs=[row * -0.01 for row in rows])
    row = SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason="stop", routed_experts=None)
    return SimpleNamespace(request_id=name, finished=True, outputs=[row])


@pytest.fixture
def second_rank():
    """The second of two ranks of an engine, each with a request or more. Outputs come in another order."""
    engine, llm = VLLMEngine.__new__(VLLMEngine), Mock()
    vars(engine).update(llm=llm, asleep=False, loads=0, make_params=lambda **how: None)
    engine._of_all_ranks = lambda here: ([([[5]], [[1]]), here], 1)
    llm.enqueue.return_value = ["7-x", "8-x", "9-x", "10-x"]
    llm.llm_engine.step.side_effect = [[output("10", 4, 5)], [], [output("7", 1)], [output("9", 3), output("8", 2, 2)]]
    llm.llm_engine.has_unfinished_requests.side_effect = [True] * 4 + [False]
    return engine, llm.llm_engine


WORK = ([[5, 6], [9]], [[1, 2], [3]], Sampling(), 1, [1])


def test_responses_of_a_rank_in_the_order_of_requests(second_rank):
    engine, _ = second_rank
    steps = []
    groups = engine.generate(*WORK, finished=steps.append)
    assert [[r.tokens.tolist() for r in group] for group in groups] == [[[2, 2], [3]], [[4, 5]]]
    assert [[(i, len(r.tokens)) for i, r in step] for step in steps] == [[(1, 2)], [(0, 1), (0, 2)]]
    assert steps[0][0][1] is groups[1][0] and steps[1][0][1] is groups[0][1]


def test_requests_are_aborted_after_an_exception(second_rank):
    engine, core = second_rank
    with pytest.raises(ZeroDivisionError):
        engine.generate(*WORK, finished=lambda ended: 1 / 0)
    assert core.abort_request.mock_calls == [call(["7-x", "8-x", "9-x", "10-x"], internal=True)]


def test_vllm_is_usable_after_an_exception(vllm_engine):
    args = ([[5, 6, 7]], [[1, 2, 3]], Sampling(max_tokens=20), 3, STOP)
    before = vllm_engine.generate(*args)
    with pytest.raises(ZeroDivisionError):
        vllm_engine.generate(*args, finished=lambda ended: 1 / 0)
    assert not vllm_engine.llm.llm_engine.has_unfinished_requests()
    assert all(same_tokens(a, b) for a, b in zip(flat(before), flat(vllm_engine.generate(*args)), strict=True))
