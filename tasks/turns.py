"""Multi-turn conversations: an environment replies, and the model continues the token sequence.

    prompt | sampled tokens, end token | reply in the chat template's frame | sampled tokens | ...

Sampled tokens are never decoded and tokenized again: the engine continues its own tokens, so a
response's log-probabilities belong to its tokens. Tokens of a reply carry no gradient, and are
excluded from weights and statistics (Response.loss_mask). A response has at most --max_tokens
tokens, replies included.

A class of --task=FILE.py:CLASS with a method `reply(row, messages, text)` is an environment. The
method gets the row, the messages so far and the text of the model's last turn. It returns the text
of the next message, or None to end the conversation."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rollout import Response, request_seed
from tasks.grading import graders
from tasks.prompts import Problem, as_messages, render
from tasks.rewards import GRADE_SECONDS, tell_once

MARK = "THE MODEL'S TURN"  # placeholder of a model turn in the chat template
PER_TOKEN = ("tokens", "loss_mask", "logp_inf", "topk_ids", "topk_logp")


@dataclass
class Talk:
    """An unfinished conversation."""

    problem: Problem
    prompt: np.ndarray  # int32 [P]
    seed: int
    response: Response
    messages: list[dict]
    turn_start: int = 0  # index in the response at which the model's last turn begins


def sample(
    engine, task, tokenizer, problems, prompts, seeds, sampling, *options, finished=None
):
    """A list of responses to each prompt, as from engine.generate; with an environment each
    response is a whole conversation, and `finished` is not called. Collective if several ranks form
    one engine.

    options: the engine's topk, stop_ids and max_allowed."""
    environment = getattr(task, "environment", "")
    callback = (
        {"finished": finished} if finished is not None and not environment else {}
    )
    groups = engine.generate(prompts, seeds, sampling, *options, **callback)
    if not environment:
        return groups
    talks = []
    for problem, prompt, group_seeds, group in zip(
        problems, prompts, seeds, groups, strict=True
    ):
        for seed, response in zip(group_seeds, group, strict=True):
            talks.append(
                Talk(problem, prompt, seed, response, as_messages(problem.prompt))
            )
    turn = 0
    while engine.any_rank(bool(talks)):
        turn += 1
        talks = with_replies(environment, talks, tokenizer, sampling.max_tokens)
        rooms = [sampling.max_tokens - len(talk.response.tokens) for talk in talks]
        turns = engine.generate(
            [np.concatenate([talk.prompt, talk.response.tokens]) for talk in talks],
            [[request_seed("turn", talk.seed, turn)] for talk in talks],
            replace(sampling, max_tokens=max(rooms, default=1)),
            *options,
        )
        for talk, room, (response,) in zip(talks, rooms, turns, strict=True):
            extend(talk.response, shortened(response, room))
    return groups


def with_replies(
    environment: str, talks: list[Talk], tokenizer, max_tokens: int
) -> list[Talk]:
    """The conversations that continue, with the environment's replies appended. A conversation that
    would leave no token for the model is cut."""
    talks = [talk for talk in talks if talk.response.finish_reason == "stop"]
    turns = [talk.response.tokens[talk.turn_start :] for talk in talks]
    texts = [tokenizer.decode(turn, skip_special_tokens=True) for turn in turns]
    calls = [
        (t.problem.row, t.messages, text) for t, text in zip(talks, texts, strict=True)
    ]
    replies = graders().grade(environment, calls, GRADE_SECONDS)
    going_on = []
    for talk, text, reply in zip(talks, texts, replies, strict=True):
        if not isinstance(reply, str):  # a Failure, or None
            why = getattr(reply, "why", "a call exceeded the time limit")
            tell_once(environment, f"{why}; the conversation ends there")
        if not isinstance(reply, str) or not reply:  # "": the environment's end
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
    """The tokens (int32) from the end of a model turn, after its token `last`, to the next turn:
    the reply in the chat template's frame, or without a template only the reply."""
    user, model = (
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": MARK},
    )
    messages = [user, model, {"role": "user", "content": reply}]
    text, templated = render(tokenizer, replace(problem, prompt=messages))
    frame = text.rpartition(MARK)[2] if templated else reply
    ids = tokenizer.encode(frame, add_special_tokens=False)
    if last in ids[:2]:  # the sampled end token; some templates write a blank before it
        ids = ids[ids.index(last) + 1 :]
    return np.array(ids, np.int32)


def written(ids: np.ndarray, beside: Response) -> Response:
    """A response of tokens that were not sampled, with arrays shaped like those of `beside`."""
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
    """Append the tokens of the response `more`, in place."""
    for name in PER_TOKEN:
        setattr(
            response,
            name,
            np.concatenate([getattr(response, name), getattr(more, name)]),
        )
    if response.allowed_ids is not None:
        begin = response.allowed_offsets[-1]
        offsets = [response.allowed_offsets, begin + more.allowed_offsets[1:]]
        response.allowed_offsets = np.concatenate(offsets)
        response.allowed_ids = np.concatenate([response.allowed_ids, more.allowed_ids])
    if more.routed is not None:  # includes all previous tokens
        response.routed = more.routed
    response.finish_reason = more.finish_reason


def shortened(response: Response, room: int) -> Response:
    """The response cut to `room` tokens. Draws depend only on seed and position, so sampling with
    this limit gives the same tokens."""
    cut = len(response.tokens) - room
    if cut <= 0:
        return response
    first = {name: getattr(response, name)[:room] for name in PER_TOKEN}
    if response.allowed_ids is not None:
        offsets = response.allowed_offsets[: room + 1]
        first |= {
            "allowed_offsets": offsets,
            "allowed_ids": response.allowed_ids[: offsets[-1]],
        }
    if response.routed is not None:
        first["routed"] = response.routed[:-cut]
    return replace(response, finish_reason="length", **first)


def turns_of(mask) -> np.ndarray:
    """The turn (B, T), from 0, of each token, from a mask (B, T) that is False at replies. A reply
    belongs to the turn after it."""
    mask = np.asarray(mask, bool)
    before = np.concatenate([mask[:, :1], mask[:, :-1]], 1)
    return (before & ~mask).cumsum(1)
