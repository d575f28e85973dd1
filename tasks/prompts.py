"""The form of prompts: system prompt, template, chat template, and the tokens that end a response.

    a row's problem --prompt_template--> text --system_prompt--> messages --chat template--> tokens

Policy, actor, engine and evaluation use the tokens of `encode`; `python eval.py --show_prompt`
prints them as text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from config import PromptFlags
from machinery.flags import UserError, need, read_json, read_text, shortened

# Names for --prompt_template. By default the reward chooses the template (tasks/builtin.py).
TEMPLATES = {
    "plain": "{problem}",
    "boxed": "{problem}\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "hashes": "{problem}\nPlease reason step by step, and end with one line: #### and the final answer.",
    "letter": "{problem}\nPlease reason step by step, and put the letter of your answer within \\boxed{}.",
}
PYTHONS = {"True": "true", "False": "false", "None": "null"}
SHOWN = 3  # prompts that --show_prompt prints


@dataclass(frozen=True)
class Chat:
    """The conversion of messages to text."""

    # Jinja; None: the tokenizer's template, if any; "": no template
    template: str | None = None
    # template arguments, such as enable_thinking
    kwargs: tuple[tuple[str, object], ...] = ()
    date: str = ""  # current date for the template; "": today


@dataclass(frozen=True)
class Problem:
    """One problem. `id` is stable across runs; `answer` is the final answer for the built-in
    rewards."""

    id: str
    prompt: str | list[dict[str, str]]  # a text, or messages {role, content}
    answer: str
    # every column of a file's row, for reward functions of a user
    row: dict = field(default_factory=dict)
    chat: Chat = Chat()


@dataclass(frozen=True)
class Answer:
    """A response for the grader: its text without special tokens, and whether it ended with a stop
    token."""

    problem: Problem
    text: str
    finished: bool
    tokens: int = 0  # number of tokens of the response
    count: Callable[[str], int] = len  # function that counts the tokens of a text


@dataclass(frozen=True)
class Style:
    """The form of the prompts of a file: the parsed flags of `PromptFlags`."""

    system: str = ""
    template: str = TEMPLATES["boxed"]
    # apply the template also to messages and to prompts with an instruction
    always: bool = False
    chat: Chat = Chat()

    @classmethod
    def of(cls, cfg: PromptFlags, usual: str) -> Style:
        """The style given by the flags. usual: the template without --prompt_template. Raises
        UserError."""
        named = cfg.prompt_template
        template = TEMPLATES.get(named or usual) or text_or_file(named)
        need(
            template.count("{problem}") == 1,
            f"--prompt_template={named}: must contain {{problem}} exactly once, or be one of {', '.join(TEMPLATES)}, "
            "or be a file",
        )
        system = text_or_file(cfg.system_prompt)
        need(
            not re.fullmatch(r"\S+\.(txt|md)", system),
            f"--system_prompt={system}: no such file; give an existing file, or a text",
        )
        chat = Chat(chat_template_of(cfg), chat_kwargs_of(cfg), date_of(cfg))
        return cls(system, template, bool(named), chat)

    def ask(self, prompt: str | list[dict]) -> str | list[dict]:
        """The prompt of a row's problem (a text or messages), with template and system prompt."""
        messages = as_messages(prompt)
        last = messages[-1]
        marks = [mark for mark in ("\\boxed", "####") if mark in self.template]
        instructed = isinstance(prompt, list) or any(
            mark in last["content"] for mark in marks
        )
        if self.always or not instructed:
            last["content"] = self.template.replace("{problem}", last["content"])
        if self.system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system})
        only_text = len(messages) == 1 and not isinstance(prompt, list)
        return last["content"] if only_text else messages


def as_messages(prompt: str | list[dict]) -> list[dict]:
    """A copy of the prompt as messages {role, content}."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [dict(message) for message in prompt]


def text_or_file(value: str) -> str:
    """The text given by a flag, or the text of the file that the flag names."""
    try:
        is_file = Path(value).is_file()
    except (OSError, ValueError):  # too long for a file name, or with a zero byte
        is_file = False
    return read_text(value).rstrip("\n") if value and is_file else value


def contents(cfg: PromptFlags) -> dict[str, str]:
    """The flags that may name files, with the contents of the files, for a host without the
    files."""
    flags = ("system_prompt", "prompt_template", "chat_template")
    return {flag: text_or_file(getattr(cfg, flag)) for flag in flags}


def chat_template_of(cfg: PromptFlags) -> str | None:
    """The value of `Chat.template` for --chat_template. Raises UserError."""
    if cfg.chat_template in ("auto", "off"):
        return None if cfg.chat_template == "auto" else ""
    text = text_or_file(cfg.chat_template)
    need(
        "{" in text,
        f"--chat_template={cfg.chat_template}: no such file; give auto, off, or a file of Jinja",
    )
    return text


def date_of(cfg: PromptFlags) -> str:
    """The date of --chat_date in ISO format, or "". Raises UserError if it is not a date."""
    try:
        return (
            cfg.chat_date and datetime.fromisoformat(cfg.chat_date).date().isoformat()
        )
    except ValueError:
        raise UserError(
            f"--chat_date={cfg.chat_date}: not a date; write YYYY-MM-DD"
        ) from None


def chat_kwargs_of(cfg: PromptFlags) -> tuple[tuple[str, object], ...]:
    """The (name, value) pairs of --chat_kwargs=name=value,...; a value is JSON, or else a text."""
    pairs = []
    for part in filter(None, map(str.strip, cfg.chat_kwargs.split(","))):
        name, equals, value = part.partition("=")
        need(
            equals and name.isidentifier(),
            f"--chat_kwargs={cfg.chat_kwargs}: write NAME=VALUE, separated by commas, such as enable_thinking=false",
        )
        try:
            pairs.append((name, json.loads(PYTHONS.get(value, value))))
        except ValueError:
            pairs.append((name, value))
    return tuple(pairs)


def encode(tokenizer, problem: Problem) -> list[int]:
    """Token ids of a problem's prompt. Raises UserError if the chat template rejects the prompt."""
    return encode_all(tokenizer, [problem])[0]


def encode_all(tokenizer, problems: list[Problem]) -> list[list[int]]:
    """`encode` for problems with the same `chat`, which lets fast tokenizers use all cores."""
    texts, templated = zip(
        *[render(tokenizer, problem) for problem in problems], strict=True
    )
    # a template writes the special tokens itself
    return tokenizer(list(texts), add_special_tokens=not templated[0])["input_ids"]


def render(tokenizer, problem: Problem) -> tuple[str, bool]:
    """(text to tokenize, whether a chat template made it)."""
    chat, messages = problem.chat, as_messages(problem.prompt)
    template = (
        getattr(tokenizer, "chat_template", None)
        if chat.template is None
        else chat.template
    )
    if not template:
        return "\n\n".join(message["content"] for message in messages), False
    options = dict(chat.kwargs) | {"add_generation_prompt": True, "tokenize": False}
    if chat.date:  # else the prompt depends on this host's clock and time zone
        options["strftime_now"] = datetime.fromisoformat(chat.date).strftime
    try:
        return tokenizer.apply_chat_template(
            messages, chat_template=chat.template, **options
        ), True
    except Exception as e:  # Jinja raises many types
        raise UserError(
            f"{problem.id}: the chat template rejects this prompt ({shortened(e)}); check --system_prompt, "
            "--chat_kwargs and --chat_template"
        ) from None


def shown(tokenizer, problems: list[Problem], ends: list[int]) -> str:
    """The output of --show_prompt: prompts with visible special tokens, and the stop tokens."""
    lines = []
    for problem in problems:
        ids = encode(tokenizer, problem)
        # decoding must not clean up spaces
        text = tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        lines += [f"--- {problem.id}: {len(ids)} tokens, answer {problem.answer}", text]
    names = [f"{tokenizer.convert_ids_to_tokens(i)} ({i})" for i in ends]
    return "\n".join([*lines, f"--- a response ends with {' or '.join(names)}"])


def stop_ids(tokenizer, folders, stop: str = "") -> list[int]:
    """Ids of the tokens that end a response, the same in every engine and in evaluation.

    They are the tokenizer's end token, each `eos_token_id` in the generation_config.json (without
    one, in the config.json) of these model folders, and the tokens of --stop. Raises UserError."""
    ids = [tokenizer.eos_token_id]
    for folder in folders:
        files = [Path(folder) / f"{name}config.json" for name in ("generation_", "")]
        path = next((path for path in files if path.is_file()), None)  # as in vLLM
        if path is None:
            continue
        listed = read_json(path, "fix or remove it").get("eos_token_id")
        listed = listed if isinstance(listed, list) else [listed]
        bad = [i for i in listed if i is not None and type(i) is not int]
        need(
            not bad,
            f"{path}: its eos_token_id lists {bad[:1]}, which is not a token id; fix it",
        )
        ids += listed
    ids += [
        token_id(tokenizer, word.strip() or word) for word in stop.split(",") if word
    ]
    ids = [i for i in dict.fromkeys(ids) if i is not None]
    need(
        ids,
        "the tokenizer has no token that ends a response, and its model lists none: name one with --stop",
    )
    return ids


def token_id(tokenizer, word: str) -> int:
    """The id of a token with this text. Raises UserError if the text is not exactly one token."""
    vocabulary = tokenizer.get_vocab()
    if word in vocabulary:
        return vocabulary[word]
    ids = tokenizer.encode(word, add_special_tokens=False)
    need(
        len(ids) == 1 and ids[0] != tokenizer.unk_token_id,
        f"--stop={word}: not one token of the model's vocabulary; give tokens, such as <|im_end|>, separated by commas",
    )
    return ids[0]
