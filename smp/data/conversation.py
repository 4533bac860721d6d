"""Conversations: from messages to tokens by a chat template, and which of the tokens are trained on.

Stock templates do not mark what the assistant says (``{% generation %}``), so a turn is found by rendering the
conversation up to it, with the generation prompt, and including it: the difference is what the model would generate.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from smp.data.columns import CONTEXT, SYSTEM, refuse_columns
from smp.data.config import TrainOn
from smp.data.messages import (
    ConversationError,
    Message,
    form_of,
    from_json,
    from_other_forms,
    is_empty,
    is_trained,
    messages_of,
    with_system,
)
from smp.data.template import given_template, render
from smp.data.text import prefix_of
from smp.errors import UserError, a_type

LISTS = ("tools", "documents")  # that templates are given
NO_THOUGHT = re.compile(r"\s*<think>\s*</think>\s*")


@dataclasses.dataclass(frozen=True)
class Chat:
    """A chat template with its tokenizer; pickled to worker processes.

    Attributes:
        tokenizer: a fast tokenizer of transformers.
        template: Jinja; None: there is none, and the sentence of that is ``missing``.
        train_on: ``assistant``: every assistant turn; ``last``: the last one; ``completion``: the turns of
            ``completion``; ``all``: all tokens; ``auto``: what the sample's keys ask for.
        prefix: ids that begin a text.
    """

    tokenizer: Any
    template: str | None
    train_on: TrainOn = "auto"
    prefix: tuple[int, ...] = ()
    missing: str = ""

    def encode(self, sample: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Return ids (n,) int64 and labels (n,) int64, not shifted, -100 where a token is not trained on.

        Args:
            sample: ``messages``, or ``prompt`` and ``completion`` (both strings or both messages), or ``text``, or what
                :func:`smp.data.messages.from_other_forms` takes for messages; with messages also ``CONTEXT``.

        Raises:
            ConversationError: it is none of these, has a column that would have to be read, or the template cannot
                render it.
        """
        refuse_columns(sample)
        form, sample = form_of(sample), from_other_forms(sample)
        if sample.get("messages") is not None:
            if self.train_on == "completion":
                raise ConversationError("has messages, and --train_on completion needs prompt and completion")
            name = "conversations" if form == ("conversations",) else "messages"
            return self._encode_messages(_messages(sample, "messages", name), sample)
        if sample.get("prompt") is not None and sample.get("completion") is not None:
            texts = [isinstance(sample[key], str) for key in ("prompt", "completion")]
            if all(texts):
                if beside := [key for key in CONTEXT if not is_empty(sample.get(key))]:
                    raise ConversationError(f"has {beside[0]}, and a prompt that is a text: write it into the prompt")
                return self._encode_text(sample["prompt"], sample["completion"])
            if any(texts):
                found = f"they are {a_type(sample['prompt'])} and {a_type(sample['completion'])}"
                raise ConversationError(f"prompt and completion must be two texts or two lists of messages, {found}")
            completion = _messages(sample, "completion")
            last = None if self.train_on == "assistant" else len(completion)
            return self._encode_messages([*_messages(sample, "prompt"), *completion], sample, last=last)
        if isinstance(sample.get("text"), str):
            return self._encode_text("", sample["text"])
        if "chosen" in sample and "rejected" in sample:
            raise ConversationError("is a pair of answers: --dpo 1 trains on such, or give messages")
        raise ConversationError(
            f"has no conversation; keys found: {', '.join(sample) or 'none'}; needed is messages, or prompt and "
            f"completion, or text, or ShareGPT's conversations, or Alpaca's instruction and output"
        )

    def _encode_text(self, prompt: str, completion: str) -> tuple[np.ndarray, np.ndarray]:
        """Encode a text between the tokens that the tokenizer begins texts with and its end-of-sequence token."""
        if self.train_on == "last" or (self.train_on in ("assistant", "completion") and not prompt):
            raise ConversationError(f"is a text without turns, and --train_on {self.train_on} trains on some of them")
        start = 0 if self.train_on == "all" else len(prompt)
        ids, offsets = self._tokenize(prompt + completion)
        first, last = list(self.prefix), self.tokenizer.eos_token_id
        has = len(first) if ids[: len(first)] == first else 0  # the text may have them already
        ids, offsets = ids[has:], offsets[has:]
        if ids[-1:] == [last]:
            ids, offsets = ids[:-1], offsets[:-1]
        trained = _covered(offsets, start, len(prompt + completion))
        return _labelled([*first, *ids, last], [*(False for _ in first), *trained, True])

    def _encode_messages(
        self, messages: list[Message], sample: Mapping[str, Any], *, last: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Encode messages, of which the ``last`` so many may be trained on, by default all."""
        given = self._given(sample)
        for column in SYSTEM:
            messages = with_system(messages, sample.get(column), column)
        first = 0 if last is None else len(messages) - last
        text = self._render(messages, given)
        if _quotes_arguments(messages, text):
            messages = _with_parsed_arguments(messages)
            text = self._render(messages, given)
        _refuse_left_out(messages, given["tools"], text)
        ids, offsets = self._tokenize(text)
        if self.train_on == "all":
            for number, message in enumerate(messages):
                if not is_trained(message):
                    raise ConversationError(f"message {number + 1} is not to be trained on, and --train_on is all")
            return _labelled(ids, np.ones(len(ids), bool))
        trained = np.zeros(len(ids), bool)
        for start, end in self._turns(messages, given, text, first):
            trained |= _covered(offsets, start, end)
        return _labelled(ids, trained)

    def _given(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a sample gives to the template besides its messages."""
        settings = sample.get("chat_template_kwargs")
        settings = {} if is_empty(settings) else settings
        if not isinstance(settings, dict):
            raise ConversationError(f"has chat_template_kwargs that are {a_type(settings)}; they must be an object")
        if not is_empty(sample.get("documents")) and "documents" not in (self.template or ""):
            raise ConversationError("has documents, which the chat template does not read: give one that does")
        lists = {key: None if is_empty(sample.get(key)) else from_json(sample[key], key) for key in LISTS}
        return {**lists, **settings}

    def _tokenize(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text, and the begin and end of each in it."""
        try:
            text.encode()
        except UnicodeEncodeError as error:  # half of a character, which JSON can hold
            raise ConversationError(f"has a text that is not Unicode ({error.reason}): leave it out") from error
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return encoding["input_ids"], encoding["offset_mapping"]

    def _turns(
        self, messages: list[Message], given: dict[str, Any], text: str, first: int
    ) -> Iterator[tuple[int, int]]:
        """Yield begin and end in ``text`` of what the assistant generates in each turn from message ``first`` on."""
        turns = [at for at in range(first, len(messages)) if messages[at]["role"] == "assistant"]
        for at in turns[-1:] if self.train_on == "last" else turns:
            if not is_trained(messages[at]):
                continue
            after = self._render(messages[: at + 1], given)
            before = self._render(messages[:at], given, prompt=True) if at else self._header(after, messages, given)
            if not after.startswith(before):  # as DeepSeek-R1's, which opens a thought that no turn shows
                raise ConversationError(
                    f"the chat template does not show message {at + 1} (assistant) behind its generation prompt, which "
                    f"ends with {before[-20:]!r}: give --chat_template FILE with a template that does"
                )
            if not text.startswith(before):
                raise ConversationError(_rewritten(at))
            body, stop = self._split_stop(after[len(before) :])
            empty = NO_THOUGHT.match(body)
            thought = empty.end() if empty and not NO_THOUGHT.match(messages[at]["content"]) else 0
            start = len(before)
            if text.startswith(body, start):
                start, body = start + thought, body[thought:]
            elif text.startswith(body[thought:], start):  # inserted into the last turn alone
                body = body[thought:]
            else:
                raise ConversationError(_rewritten(at))
            end = start + len(body)
            # Where an earlier turn ends otherwise than the last one does, its end is not what stops generation.
            yield start, end + (len(stop) if text.startswith(stop, end) else 0)

    def _header(self, after: str, messages: list[Message], given: dict[str, Any]) -> str:
        """Return what precedes the assistant's words in ``after``, the text of a first message of the assistant."""
        with_prompt = self._render(messages[:1], given, prompt=True)
        header = with_prompt[len(after) :] if with_prompt.startswith(after) else ""
        return after[: after.index(header) + len(header)] if header and header in after else ""

    def _split_stop(self, generated: str) -> tuple[str, str]:
        """Split what a turn generates into its text and the token that ends it; white space after that is left out."""
        shown = generated.rstrip()
        added = self.tokenizer.added_tokens_decoder.values()
        # An added </tool_call> or </think> closes a part of a turn, and not the turn; a special </s> does.
        of_turns = (str(each) for each in added if each.special or not str(each).startswith("</"))
        stops = {*of_turns, *self.tokenizer.all_special_tokens}
        for token in sorted(stops, key=len, reverse=True):
            if shown.endswith(token):
                return shown[: -len(token)], token
        raise ConversationError(
            f"the chat template ends an assistant turn with {shown[-20:]!r}, no special token: a model trained so "
            f"would not stop; give --chat_template FILE with a template that ends it with {self.tokenizer.eos_token}"
        )

    def _render(self, messages: list[Message], given: dict[str, Any], *, prompt: bool = False) -> str:
        if self.template is None:
            raise ConversationError(self.missing)
        return render(self.template, messages, prompt=prompt, **self.tokenizer.special_tokens_map, **given)


def _functions(messages: list[Message]) -> Iterator[dict[str, Any]]:
    """Yield the functions that messages call, with their arguments, as far as they have the usual form."""
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function", call) if isinstance(call, dict) else None
            if isinstance(function, dict):
                yield function


def _quotes_arguments(messages: list[Message], text: str) -> bool:
    """Return whether arguments that are texts of JSON, OpenAI's form, are rendered as a string within JSON."""
    arguments = [function.get("arguments") for function in _functions(messages)]
    return any(isinstance(each, str) and json.dumps(each, ensure_ascii=False) in text for each in arguments)


def _with_parsed_arguments(messages: list[Message]) -> list[Message]:
    messages = copy.deepcopy(messages)
    for function in _functions(messages):
        with contextlib.suppress(ValueError, TypeError):
            function["arguments"] = json.loads(function["arguments"])
    return messages


def _refuse_left_out(messages: list[Message], tools: Any, text: str) -> None:
    """Raise for messages, tools and calls that a template leaves out; of an assistant's words it may drop reasoning."""
    contents = [message["content"].strip() for message in messages if message["role"] != "assistant"]
    for number, message in enumerate(messages):
        content = message["content"].strip()
        forms = {content, json.dumps(content, ensure_ascii=False)[1:-1]}  # what tools say is JSON in some templates
        expected = sum(each.count(content) for each in contents)
        if content and message["role"] != "assistant" and sum(map(text.count, forms)) < expected:
            raise ConversationError(f"message {number + 1} ({message['role']}) is left out by the chat template")
    listed = [tool.get("function", tool) for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    for what, functions in (("tools", listed), ("calls of tools", [*listed, *_functions(messages)])):
        names = [function.get("name") for function in functions if isinstance(function, dict)]
        for name in names:
            if isinstance(name, str) and text.count(name) < names.count(name):
                raise ConversationError(
                    f"{what} ({name}) are left out by the chat template: give a template that has them"
                )


def _covered(offsets: list[tuple[int, int]], start: int, end: int) -> np.ndarray:
    """Return which tokens have a character of a part of the text, as a token across its border has."""
    begins, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    return (ends > start) & (begins < end)


def _labelled(ids: Sequence[int], trained: Any) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.array(ids, np.int64)
    return tokens, np.where(np.asarray(trained, bool), tokens, -100)


def _messages(sample: Mapping[str, Any], key: str, name: str | None = None) -> list[Message]:
    """Return the checked messages of a column, which the file calls ``name``."""
    name = name or key
    found = from_json(sample[key], name)
    for number, each in enumerate(found if isinstance(found, list) else ()):
        refuse_columns(each if isinstance(each, dict) else {}, f"{name}[{number}]")
    return messages_of(found, name)


def _rewritten(at: int) -> str:
    return (
        f"the chat template shows message {at + 1} (assistant) otherwise once another turn follows, as it drops "
        f"reasoning: what the model would generate is not in the text; --train_on last trains on the last turn alone"
    )


def chat_of(tokenizer: Any, folder: str, *, template: str | None, train_on: TrainOn) -> Chat:
    """Return the chat of a tokenizer.

    Args:
        template: what --chat_template names, or None for the tokenizer's own, which texts do without.

    Raises:
        UserError: the template cannot be read, or the tokenizer tells no positions of its tokens.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(f"the tokenizer in {folder} has no tokenizer.json, which conversations need: convert it")
    prefix, tokenizer = tuple(prefix_of(tokenizer)), copy.deepcopy(tokenizer)
    tokenizer.backend_tokenizer.post_processor = None  # it may trim the positions of tokens to what is no white space
    own = tokenizer.chat_template if template is None else given_template(template)
    if isinstance(own, str):
        return Chat(tokenizer, own, train_on, prefix)
    has = f"several chat templates ({', '.join(own)})" if isinstance(own, dict) else "no chat template"
    other = "the file of one by --chat_template FILE"
    if not isinstance(own, dict):
        other = "--chat_template FILE, a chat model's directory or chatml, or a chat model's tokenizer"
    return Chat(tokenizer, None, train_on, prefix, f"the tokenizer in {folder} has {has}: give {other}")
