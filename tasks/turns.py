"""Several turns: an environment replies to the model, which goes on in the same sequence of tokens.

    prompt | sampled tokens, their end | reply, framed by the chat template | sampled tokens | ...

Nothing is decoded and tokenized again: the engine continues the tokens that it sampled, so the
log-probabilities of a response are those of its own tokens. Tokens of a reply carry no gradient and
count in no weight and no statistic (Response.loss_mask). The tokens of a response, replies among
them, number at most --max_tokens.

A class of --task=FILE.py:CLASS with a method `reply(row, messages, text)` is an environment. It
gets the row, the messages so far and the text of the model's last turn, and returns the text of
the next message, or None at the end."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rollout import Response, request_seed
from tasks.grading import Failure, graders
from tasks.prompts import Problem, render
from tasks.rewards import GRADE_SECONDS, tell_once

MARK = "THE MODEL'S TURN"  # stands for it while a chat template frames the reply
PER_TOKEN = ("tokens", "loss_mask", "logp_inf", "topk_ids", "topk_logp")


@dataclass
class Talk:
    """A conversation that goes on."""

    problem: Problem
    prompt: np.ndarray  # int32 [P]
    seed: int
    response: Response
    messages: list[dict]
    turn_start: int = 0  # the place in the response at which the model's last turn begins


def sample(engine, task, tokenizer, problems, prompts, seeds, sampling, topk, ends, max_allowed=0):
    """Responses to each prompt, list of lists, as engine.generate returns them; with an environment
    each is a whole conversation. Collective where ranks are one engine."""
    groups = engine.generate(prompts, seeds, sampling, topk, ends, max_allowed)
    environment = getattr(task, "environment", "")
    if not environment:
        return groups
    talks = []
    for problem, prompt, group_seeds, group in zip(problems, prompts, seeds, groups, strict=True):
        for seed, response in zip(group_seeds, group, strict=True):
            talks.append(Talk(problem, prompt, seed, response, as_messages(problem)))
    turn = 0
    while engine.any_rank(bool(talks)):
        turn += 1
        talks = with_replies(environment, talks, tokenizer, sampling.max_tokens)
        rooms = [sampling.max_tokens - len(talk.response.tokens) for talk in talks]
        turns = engine.generate(
            [np.concatenate([talk.prompt, talk.response.tokens]) for talk in talks],
            [[request_seed("turn", talk.seed, turn)] for talk in talks],
            replace(sampling, max_tokens=max(rooms, default=1)),
            topk,
            ends,
            max_allowed,
        )
        for talk, room, (response,) in zip(talks, rooms, turns, strict=True):
            extend(talk.response, shortened(response, room))
    return groups


def as_messages(problem: Problem) -> list[dict]:
    prompt = problem.prompt
    return list(prompt) if isinstance(prompt, list) else [{"role": "user", "content": prompt}]


def with_replies(environment: str, talks: list[Talk], tokenizer, max_tokens: int) -> list[Talk]:
    """The conversations that go on, with the environment's replies appended. One in which no token
    would be left for the model is cut."""
    talks = [talk for talk in talks if talk.response.finish_reason == "stop"]
    texts = [
        tokenizer.decode(talk.response.tokens[talk.turn_start :], skip_special_tokens=True)
        for talk in talks
    ]
    calls = [(t.problem.row, t.messages, text) for t, text in zip(talks, texts, strict=True)]
    going_on = []
    for talk, text, reply in zip(
        talks, texts, graders().grade(environment, calls, GRADE_SECONDS), strict=True
    ):
        if isinstance(reply, Failure):
            tell_once(environment, reply.why, "the conversation ends there")
        if not isinstance(reply, str) or not reply:  # an empty text stands for None
            continue
        ids = framed(tokenizer, talk.problem, reply, int(talk.response.tokens[-1]))
        if len(talk.response.tokens) + len(ids) >= max_tokens:
            talk.response.finish_reason = "length"
            continue
        talk.messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": reply},
        ]
        extend(talk.response, written(ids, talk.response))
        talk.turn_start = len(talk.response.tokens)
        going_on.append(talk)
    return going_on


def framed(tokenizer, problem: Problem, reply: str, last: int) -> np.ndarray:
    """The tokens between a turn of the model that ended with the token `last` and its next turn,
    int32: the reply as the chat template frames it, or without a template the reply alone."""
    user, model = {"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}
    messages = [user, model, {"role": "user", "content": reply}]
    text, templated = render(tokenizer, replace(problem, prompt=messages))
    frame = text.rpartition(MARK)[2] if templated else reply
    ids = tokenizer.encode(frame, add_special_tokens=False)
    if ids[:1] == [last]:  # the template's end of a turn, which the model has sampled
        ids = ids[1:]
    return np.array(ids, np.int32)


def written(ids: np.ndarray, beside: Response) -> Response:
    """Tokens that were not sampled, with arrays of the shapes of another response."""
    n, K = len(ids), beside.topk_ids.shape[1]
    response = Response(
        tokens=ids,
        loss_mask=np.zeros(n, bool),
        logp_inf=np.zeros(n, np.float32),
        topk_ids=np.tile(np.arange(K, dtype=np.int32), (n, 1)),
        topk_logp=np.full((n, K), -np.inf, np.float32),
        finish_reason="stop",
    )
    if beside.allowed_ids is not None:
        response.allowed_ids = ids
        response.allowed_offsets = np.arange(n + 1, dtype=np.int64)
    return response


def extend(response: Response, more: Response) -> None:
    """Append the tokens of another response, in place."""
    for name in PER_TOKEN:
        setattr(response, name, np.concatenate([getattr(response, name), getattr(more, name)]))
    if response.allowed_ids is not None:
        begin = response.allowed_offsets[-1]
        response.allowed_offsets = np.concatenate(
            [response.allowed_offsets, begin + more.allowed_offsets[1:]]
        )
        response.allowed_ids = np.concatenate([response.allowed_ids, more.allowed_ids])
    if more.routed is not None:  # the engine has read all tokens before these again
        response.routed = more.routed
    response.finish_reason = more.finish_reason


def shortened(response: Response, room: int) -> Response:
    """The response as a limit of `room` tokens would have cut it: draws depend on places alone."""
    cut = len(response.tokens) - room
    if cut <= 0:
        return response
    first = {name: getattr(response, name)[:room] for name in PER_TOKEN}
    if response.allowed_ids is not None:
        offsets = response.allowed_offsets[: room + 1]
        first |= {"allowed_offsets": offsets, "allowed_ids": response.allowed_ids[: offsets[-1]]}
    if response.routed is not None:
        first["routed"] = response.routed[:-cut]
    return replace(response, finish_reason="length", **first)


def turns_of(mask) -> np.ndarray:
    """The turn of each token, from 0: (B, T) of a mask (B, T) that is False at replies. The tokens
    of a reply belong to the turn after it."""
    mask = np.asarray(mask, bool)
    before = np.concatenate([mask[:, :1], mask[:, :-1]], 1)
    return (before & ~mask).cumsum(1)
