"""Messages of conversations in one form, from the forms and with the keys that other programs have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from smp.errors import a_type

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
# Keys by which a turn is left out of training: OpenAI's and LLaMA-Factory's, slime's, ms-swift's, Axolotl's, verl's. Of
# the last one, Axolotl's parts of a turn, nothing is read.
TRAINED = (
    "weight", "loss_weight", "loss_mask", "step_loss_mask", "loss", "train", "training", "trainable", "train_detail",
)  # fmt: skip
SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool"}
# What makes a row a conversation, in the order in which it is looked for.
FORMS = (("messages",), ("prompt", "completion"), ("conversations",), ("instruction", "output"), ("text",))
CALLS = '"tool_calls": [{"type": "function", "function": {"name": ..., "arguments": ...}}]'


class ConversationError(ValueError):
    """A conversation cannot be used; says why, without file and line."""


class NotTextError(ConversationError):
    """A conversation has an image, a video or a sound."""


def is_empty(value: Any) -> bool:
    """Return whether a value is empty: null, false, or an empty text, list or object, also as a text of JSON."""
    if isinstance(value, str):
        return value.strip() in ("", "[]", "{}", "null")
    return value is None or value is False or (hasattr(value, "__len__") and not len(value))


def form_of(sample: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the one of ``FORMS`` as which a sample is read; () if it has none."""
    trl = any(sample.get(key) is not None for key in ("completion", "chosen", "rejected"))
    forms = [form for form in FORMS if not (trl and form[0] in ("conversations", "instruction"))]
    return next((form for form in forms if all(sample.get(key) is not None for key in form)), ())


def from_json(value: Any, name: str) -> Any:
    """Return a list that may be a text of JSON, as tables have it; None for an empty one.

    Raises:
        ConversationError: it is another text.
    """
    if not isinstance(value, str):
        return value
    if is_empty(value):
        return None
    try:
        found = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ConversationError(f"has {name} that are a text, which is not valid JSON ({error}): mend it") from error
    if not isinstance(found, list):
        raise ConversationError(f"has {name} that are a text of JSON with {a_type(found)}; it must be a list")
    return found


def is_trained(message: Message) -> bool:
    """Return whether none of the message's keys leaves it out of training."""
    return all(message.get(key, True) for key in TRAINED)


def messages_of(found: Any, key: str) -> list[Message]:
    """Return checked messages, with their texts as strings.

    Args:
        key: their column, for the error.
    """
    if not isinstance(found, list) or not found:
        shown = "empty" if is_empty(found) else a_type(found)
        raise ConversationError(f"{key} must be a list of messages, it is {shown}")
    return [_message(each, f"{key}[{number}]") for number, each in enumerate(found)]


def with_system(messages: list[Message], system: Any, column: str) -> list[Message]:
    """Return messages that begin with the text of a column, if there is one."""
    if is_empty(system):
        return messages
    if not isinstance(system, str):
        raise ConversationError(f"has {column} that is {a_type(system)}; it must be a text")
    first = messages[0]
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": system}, *messages]
    if first["content"].strip() != system.strip():
        raise ConversationError(f"has {column}, and messages that begin with another system message: leave one out")
    return messages


def from_other_forms(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ShareGPT's ``conversations`` and Alpaca's ``instruction``, ``input``, ``output`` as ``messages``.

    Source: of the latter, LLaMA-Factory, which puts the input in a line behind the instruction.
    """
    form = form_of(sample)
    if form == ("conversations",):
        turns = from_json(sample["conversations"], "conversations")
        if isinstance(turns, list):
            turns = [_of_sharegpt(each, f"conversations[{number}]") for number, each in enumerate(turns)]
        rest = {key: value for key, value in sample.items() if key != "conversations"}
        return {**rest, "messages": [] if turns is None else turns}
    if form != ("instruction", "output"):
        return sample
    if not is_empty(sample.get("history")):
        raise ConversationError("has history, which is not read beside instruction and output: give messages")
    asked, more, answer = texts = [sample.get(key) for key in ("instruction", "input", "output")]
    for key, text in zip(("instruction", "input", "output"), texts, strict=True):
        if not isinstance(text, str) and not (key == "input" and is_empty(text)):
            raise ConversationError(f"has {key} that is {a_type(text)}; it must be a text")
    content = "\n".join(each for each in (asked, more) if each)
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    rest = {key: value for key, value in sample.items() if key not in ("instruction", "input", "output", "history")}
    return {**rest, "messages": turns}


def _of_sharegpt(turn: Any, name: str) -> Any:
    if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
        return turn
    role, said = turn["from"], turn["value"]
    if not isinstance(role, str) or SHAREGPT.get(role, role) not in ROLES:
        raise ConversationError(f"{name} has from {role!r}; allowed: {', '.join((*SHAREGPT, *ROLES))}")
    if not isinstance(said, (str, list)) and is_empty(turn.get("tool_calls")):
        raise ConversationError(f"{name} has value that is {a_type(said)}; it must be a string")
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    return {**rest, "role": SHAREGPT.get(role, role), "content": said}


def _message(message: Any, name: str) -> Message:
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
        shown = f"has the keys {', '.join(message)}" if isinstance(message, dict) else f"is {a_type(message)}"
        raise ConversationError(f"{name} must have role and content, it {shown}")
    if role not in ROLES:
        raise ConversationError(f"{name} has role {role!r}; allowed: {', '.join(ROLES)}")
    content, calls = message.get("content"), _calls(message.get("tool_calls"), f"{name}.tool_calls")
    if isinstance(content, list):
        if not all(isinstance(each, dict) and isinstance(each.get("text"), str) for each in content):
            raise NotTextError(f"{name} has content that is not text, which cannot be trained on: leave it out")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) and not (content is None and calls):
        raise ConversationError(f"{name} has content that is {a_type(content)}; it must be a string")
    allowed = (None, 0, 1) if role == "assistant" else (None, 0)
    for key in TRAINED:
        if message.get(key) not in allowed:
            shown = repr(message[key])
            raise ConversationError(
                f"{name} has role {role!r} and {key} {shown[:40]}{'...' * (len(shown) > 40)}; allowed: 0, and 1 for "
                f"assistant, whose turns are trained on from begin to end"
            )
    # Tables give every message the keys of all others, with null.
    found = {**{k: v for k, v in message.items() if v is not None and k != "tool_calls"}, "content": content or ""}
    return {**found, "tool_calls": calls} if calls else found


def _calls(found: Any, name: str) -> list[dict[str, Any]] | None:
    """Return the calls of a message, each with the name of a function, as templates leave out others."""
    if is_empty(found):
        return None
    calls = from_json(found, name)
    listed = calls if isinstance(calls, list) else [calls]
    functions = [each.get("function", each) if isinstance(each, dict) else each for each in listed]
    if calls is not listed or not all(isinstance(each, dict) and each.get("name") for each in functions):
        raise ConversationError(f"{name} must be a list of calls, each with a function's name, such as {CALLS}")
    return calls
