"""Environments: records of conversations with several turns, on both engines, and their use by the learner."""

import re

import numpy as np
import pytest
import torch
from conftest import make_cfg, tiny_model
from standins import tokenizer as chat_tokenizer

import batching
import eval as evaluation
import objectives
import train
from config import SampleFlags
from learner import Learner
from machinery import session, settings
from machinery.flags import UserError
from machinery.log import read_metrics
from machinery.ranks import Comm
from model.engines import HFEngine
from probe import gaps
from probe.__main__ import main as run_probe
from rollout import Response, as_groups
from sampling import Sampling
from tasks import games, grade_all, grading, make_task, rewards, turns
from tasks.arith import arithmetic_tokenizer
from tasks.prompts import Problem, encode

ENVIRONMENT = """
class Echo:
    size = None

    def problem(self, split, index):
        return {"problem": f"{index % 7} + 1 =", "answer": "5"}

    def reward(self, row, text, finish_reason):
        return float(len(text))

    def reply(self, row, messages, text):
        assert messages[-1]["role"] == "user" and row["answer"] == "5"
        return f"{len(text) % 10} +" if len(messages) < 4 else None  # three turns

class Turns(Echo):
    reward = lambda self, row, text, finish_reason: float("\\n" in text)  # more than one turn

class Ends(Echo):
    reply = lambda self, *_: None

class Raises(Echo):
    reply = lambda self, *_: 1 / 0

class Wrong(Echo):
    reply = lambda self, *_: 7.0

class Waits(Echo):
    def reply(self, row, messages, text):
        while True:
            pass
"""
STOP = list(range(1, 256, 3))  # a third of the vocabulary, so that turns of a random model are short


@pytest.fixture
def environment(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(ENVIRONMENT)
    return lambda name: make_task(SampleFlags(task=f"{path}:{name}", max_tokens=40))


TOKENIZER = arithmetic_tokenizer()


def talked(engine, task, n=4, samples=3, topk=5, max_allowed=0, **sampling):
    """(prompts, groups) of n problems."""
    problems = [task.problem("train", i) for i in range(n)]
    prompts = [np.array(encode(TOKENIZER, p), np.int32) for p in problems]
    seeds = [[100 * i + s for s in range(samples)] for i in range(n)]
    sampling = Sampling(**{"max_tokens": 40, **sampling})
    return prompts, turns.sample(engine, task, TOKENIZER, problems, prompts, seeds, sampling, topk, STOP, max_allowed)


def pieces(r):
    """[(whether the tokens were sampled, tokens)] of a response, in order."""
    cuts = [0, *(np.flatnonzero(np.diff(r.loss_mask.astype(int))) + 1), len(r.tokens)]
    return [(bool(r.loss_mask[a]), r.tokens[a:b].tolist()) for a, b in zip(cuts, cuts[1:], strict=False)]


def test_a_conversation_is_one_sequence_of_tokens(engine, environment):
    """Turns end with a stop token, replies are encoded exactly, log-probabilities equal those of one forward pass."""
    prompts, groups = talked(engine, environment("Echo"))
    model = tiny_model(1)
    responses = [(p, r) for p, group in zip(prompts, groups, strict=True) for r in group]
    finished = [r for _, r in responses if r.finish_reason == "stop"]
    assert len(finished) >= 3 and all(len(pieces(r)) == 5 for r in finished)
    for prompt, r in responses:
        parts = pieces(r)
        assert len(r.tokens) <= 40 and parts[0][0] and parts[-1][0]
        for (sampled, tokens), (_, reply) in zip(parts[:-1:2], parts[1::2], strict=False):
            assert sampled and tokens[-1] in STOP and not set(tokens[:-1]) & set(STOP)
            text = TOKENIZER.decode(tokens, skip_special_tokens=True)
            assert reply == TOKENIZER.encode(f"{len(text) % 10} +", add_special_tokens=False)
        ids = torch.tensor([*prompt.tolist(), *r.tokens.tolist()])[None]
        with torch.no_grad():
            logp = model(input_ids=ids).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        want = logp.gather(1, torch.tensor(r.tokens, dtype=torch.long)[:, None])[:, 0].numpy()
        on = r.loss_mask
        assert np.abs(want - r.logp_inf)[on].max() < 1e-4 and (r.logp_inf[~on] == 0).all()
        assert np.abs(logp.topk(5).values.numpy() - r.topk_logp)[on].max() < 1e-4
        assert r.topk_ids.shape == r.topk_logp.shape == (len(r.tokens), 5)


def test_a_conversation_beyond_the_limit_is_cut(environment):
    """With a limit of 8 tokens, equal draws give the beginnings of the conversations with a limit of 40."""
    engine, cut = HFEngine(tiny_model(1)), 0
    _, long = talked(engine, environment("Echo"))
    _, short = talked(engine, environment("Echo"), max_tokens=8)
    for a, b in zip(sum(long, []), sum(short, []), strict=True):
        n = len(b.tokens)
        assert n <= 8 and (a.tokens[:n] == b.tokens).all() and (a.loss_mask[:n] == b.loss_mask).all()
        assert b.loss_mask[-1]  # no reply at the end
        assert len(a.tokens) == n or b.finish_reason == "length"
        cut += len(a.tokens) > n
    assert cut >= 3


def test_draws_differ_between_turns_and_not_between_batches(environment, monkeypatch):
    engine, seen = HFEngine(tiny_model(1)), []
    generate = engine.generate
    monkeypatch.setattr(engine, "generate", lambda *args: seen.extend(sum(args[1], [])) or generate(*args))
    _, together = talked(engine, environment("Echo"))
    assert len(set(seen)) == len(seen) > 12
    _, alone = talked(engine, environment("Echo"), n=2, samples=1)
    assert (alone[1][0].tokens == together[1][0].tokens).all()


def test_allowed_sets_cover_replies(engine, environment):
    """Truncated sampling: the set of a reply's token contains only this token."""
    _, groups = talked(engine, environment("Echo"), max_allowed=4, top_k=4)
    seen = 0
    for r in sum(groups, []):
        assert r.allowed_offsets[-1] == len(r.allowed_ids) and len(r.allowed_offsets) == len(r.tokens) + 1
        for t, token in enumerate(r.tokens):
            allowed = r.allowed_ids[r.allowed_offsets[t] : r.allowed_offsets[t + 1]]
            assert token in allowed and len(allowed) == (4 if r.loss_mask[t] else 1)
            seen += not r.loss_mask[t]
    assert seen > 10


FAILS = {
    "Ends": "",
    "Raises": "mine.py:Raises.reply: ZeroDivisionError: division by zero (mine.py, line",
    "Wrong": "mine.py:Wrong.reply: it returned 7.0, which is neither a text nor None",
    "Waits": "mine.py:Waits.reply: a call exceeded the time limit; the conversation ends there",
}


@pytest.mark.parametrize("name", FAILS)
def test_an_environment_that_ends_or_fails_ends_the_conversation(environment, capsys, monkeypatch, name):
    """The responses are those of a task without an environment."""
    monkeypatch.setattr(rewards, "TOLD", set())
    monkeypatch.setattr(turns, "GRADE_SECONDS", 0.2)
    monkeypatch.setattr(grading, "PATIENCE", 2)
    n, engine, plain = 1 if name == "Waits" else 3, HFEngine(tiny_model(1)), environment("Ends")
    plain.environment = ""
    _, groups = talked(engine, environment(name), n=n, samples=2, max_tokens=20)
    _, single = talked(engine, plain, n=n, samples=2, max_tokens=20)
    for a, b in zip(sum(groups, []), sum(single, []), strict=True):
        assert (a.tokens == b.tokens).all() and a.loss_mask.all() and a.finish_reason == b.finish_reason
    printed = capsys.readouterr().err
    assert FAILS[name] in printed and printed.count("warning: ") == bool(FAILS[name])


def test_the_reward_reads_only_sampled_text(environment):
    """Turn by turn, one line each."""
    task = environment("Echo")
    _, groups = talked(HFEngine(tiny_model(1)), task)
    grade_all(task, TOKENIZER, [task.problem("train", i) for i in range(4)], groups)
    for r in sum(groups, []):
        sampled = [TOKENIZER.decode(tokens, skip_special_tokens=True) for on, tokens in pieces(r) if on]
        assert r.reward == len("\n".join(sampled))


def test_replies_are_encoded_like_the_chat_template():
    """Prompt, turn and reply, token by token, against the template's rendering of the whole conversation."""
    tokenizer = chat_tokenizer()
    messages = [{"role": "user", "content": "2 + 3"}]
    problem = Problem("p", messages, "5")
    talk = [*messages, {"role": "assistant", "content": "so 6"}, {"role": "user", "content": "no, less"}]
    whole = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=True, return_dict=False)
    turn = tokenizer.encode("so 6<|im_end|>", add_special_tokens=False)
    got = [*encode(tokenizer, problem), *turn, *turns.framed(tokenizer, problem, "no, less", turn[-1])]
    assert got == whole
    # after a different stop token, the template's end of a turn is added
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert turns.framed(tokenizer, problem, "no, less", turn[0])[0] == end
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", " <|im_end|>")
    assert list(turns.framed(tokenizer, problem, "no, less", end)).count(end) == 1  # of the reply


def test_the_learner_ignores_replies(environment):
    """Response weights and the gradient do not depend on the log-probabilities of reply tokens."""
    _, rows = talked(HFEngine(tiny_model(1)), environment("Echo"), topk=0)
    groups = as_groups("x", *zip(*[(np.array([5, 6], np.int32), g) for g in rows], strict=True), Sampling())
    for i, r in enumerate(sum(rows, [])):
        r.reward = float(i % 2)
    cfg = make_cfg(objective="seq_tis", actor="none", group_size=3, train_batch=12, rollout_batch=12, max_tokens=40)
    learner = Learner(tiny_model(2), None, cfg, Comm(), 256)

    def gradient():
        batch = batching.collate(groups, cfg)
        assert batch.mask.sum(1).tolist() == [int(r.loss_mask.sum()) for r in sum(rows, [])]
        learner.models.policy.zero_grad()
        learner.backward(batch, objectives.prepare(batch, learner.comm, cfg, {}))
        return [p.grad.clone() for p in learner.models.policy.parameters()]

    before = gradient()
    for r in sum(rows, []):
        r.logp_inf = np.where(r.loss_mask, r.logp_inf, -3.0).astype(np.float32)
    assert any(g.abs().max() > 0 for g in before) and all(map(torch.equal, before, gradient()))


def test_the_examples():
    """Two games, played by hand through the text that a grader reads."""
    game, row = games.Calculator(), games.Calculator().problem("train", 3)
    a, b = map(int, re.search(r"Compute (\d+) \* (\d+)", row["problem"][-1]["content"]).groups())
    messages = row["problem"]
    assert int(row["answer"]) == a * b and game.problem("test", 3) != row
    for sign, result in (("*", a * b), ("+", a + b), ("-", a - b)):
        assert game.reply(row, messages, f"calc({a} {sign} {b})") == f"Result: {result}"
    assert game.reply(row, messages, f"it is {a * b}") is None
    assert game.reply(row, [*messages, {"role": "user", "content": "Result: 5"}], f"calc({a} * {b})") is None
    assert game.reward(row, f"calc({a} * {b})\n{a * b}", "stop") == {"called": 0.2, "right": 1.0}
    assert game.reward(row, f"calc({a} * {b})", "stop") == {"called": 0.2, "right": 0.0}
    for text, right in ((f"-{a * b}", 0), (f"3.{a * b}", 0), (f"{a * b:,}.0", 1)):
        assert game.reward(row, text, "stop")["right"] == right
    words = object.__new__(games.WordProblems)  # __init__ reads GSM8K
    words.rows = {"test": [{"question": "How many?", "answer": "24*45=<<24*45=1080>>1080\n#### 1,080"}]}
    row = words.problem("test", 0)
    messages = row["problem"]
    assert row["answer"] == "1080" and messages[-1] == {"role": "user", "content": "How many?"}
    for call, result in (("7 / 2", "3.5"), ("1.50 * 200", "300"), ("5 / 0", "0")):
        assert words.reply(row, messages, f"calc({call})") == f"Result: {result}"
        messages = [*messages, {"role": "assistant", "content": call}, {"role": "user", "content": f"Result: {result}"}]
    assert words.reply(row, messages, "calc(24 * 45)") == "Result: 1080"
    assert words.reply(row, messages + messages[-2:], "calc(24 * 45)") is None


def test_a_cut_turn_keeps_the_experts_of_its_tokens():
    """Experts of 3 prompt tokens, and of all response tokens but the last."""
    n, routed = 5, np.arange(7 * 2).reshape(7, 2, 1)
    tokens = np.arange(n, dtype=np.int32)
    whole = turns.written(tokens, Response(tokens, tokens > 0, tokens, tokens[:, None], tokens[:, None], "stop"))
    whole.routed = routed
    cut = turns.shortened(whole, 3)
    assert cut.tokens.tolist() == [0, 1, 2] and (cut.routed == routed[:5]).all() and cut.finish_reason == "length"
    assert turns.shortened(whole, 5) is whole


def test_turns_and_tables_by_hand():
    mask = torch.tensor([[1, 1, 0, 1, 0, 0, 1], [1, 0, 1, 1, 1, 0, 0]], dtype=torch.bool)
    assert turns.turns_of(mask).tolist() == [[0, 0, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 2, 2]]
    packed = gaps.without_replies(torch.arange(1.0, 8.0).repeat(2, 1), mask)
    assert packed.tolist() == [[1, 2, 4, 7, 0, 0, 0], [1, 3, 4, 5, 0, 0, 0]]
    turn = gaps.without_replies(torch.from_numpy(turns.turns_of(mask)), mask).numpy()
    inf = np.log(packed.numpy().clip(1) / 8)  # p_inf = 1/8, 2/8, ...; p_ref = 1
    rows = gaps.by_turn(inf, 0 * inf, turn, np.array([4, 4]))
    assert [row["tokens"] for row in rows] == [3, 4, 1]
    assert [row["max"] for row in rows] == pytest.approx([7 / 8, (4 + 5) / 16, 1 / 8])
    assert [row["mean"] for row in rows] == pytest.approx([(6.5 + 7) / 16, (4 + 4) / 16, 1 / 8])
    assert rows[2]["kl"] == pytest.approx(8 / 7 - 1 - np.log(8 / 7))
    assert gaps.by_turn(inf, inf, np.zeros((2, 7), int), np.array([4, 4])) == []


RUN = """--objective=jackpot --steps=2 --group_size=2 --train_batch=8 --rollout_batch=8 --lr=1e-3 --actor_lr=1e-3
--eval_every=-1 --delay=constant --delay_min=1 --delay_max=30"""
COMMON = "--rollout=hf --max_tokens=24 --max_prompt_tokens=20 --dtype=float32 --stop=0,1,2,3,4,5,6,7,8,9"


def test_a_run_with_two_models_and_delays(folders, tmp_path, monkeypatch):
    """Trained end to end and evaluated: only a second turn earns a reward."""
    monkeypatch.setattr(session, "catch_signals", lambda: [])
    (tmp_path / "mine.py").write_text(ENVIRONMENT)
    task = f"--task={tmp_path / 'mine.py'}:Turns"
    models = [f"--model={folders / 'policy'}", f"--actor={folders / 'actor'}", f"--out={tmp_path / 'run'}"]
    train.train(settings.parse([*COMMON.split(), *RUN.split(), *models, task]))
    rows = read_metrics(tmp_path / "run")
    assert len(rows) == 3 and all(np.isfinite(row["loss"]) for row in rows[1:])
    assert all(row["response_length"] < 24 and row["reward"] > 0 for row in rows[1:])
    flags = ["--rollout=hf", "--problems=8", "--samples=2", "--max_prompt_tokens=20"]
    assert evaluation.main([f"--model={tmp_path / 'run'}", task, *flags])["mean@2"] > 0


def test_the_probe_reports_turns(folders, tmp_path):
    (tmp_path / "mine.py").write_text(ENVIRONMENT)
    flags = [*COMMON.split(), f"--model={folders / 'policy'}", f"--task={tmp_path / 'mine.py'}:Echo", "--problems=4"]
    with pytest.raises(UserError, match="--explain: .* several turns"):
        run_probe([*flags, "--explain"])
    result = run_probe([*flags, "--samples=2", f"--out={tmp_path / 'm.json'}"])
    assert len(result["by_turn"]) >= 2 and 0 <= result["retokenized"] <= 1
    assert result["tokens"] == sum(row["tokens"] for row in result["by_turn"])
