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


class ConversationError(ValueError):
    """A conversation cannot be used; says why, without file and line."""


def is_empty(value: Any) -> bool:
    """Return whether a value says nothing: null, or an empty text, list or object."""
    return value is None or (hasattr(value, "__len__") and not len(value))


def from_json(value: Any, name: str) -> Any:
    """Return a list that may be a text of JSON, as tables have it; None for an empty one.

    Raises:
        ConversationError: it is another text.
    """
    if not isinstance(value, str):
        return value
    if not value.strip():
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
        shown = "empty" if found == [] else a_type(found)
        raise ConversationError(f"{key} must be a list of messages, it is {shown}")
    return [_message(each, f"{key}[{number}]") for number, each in enumerate(found)]


def with_system(messages: list[Message], system: Any) -> list[Message]:
    """Return messages that begin with the text of the column ``system``, if there is one."""
    if is_empty(system):
        return messages
    if not isinstance(system, str):
        raise ConversationError(f"has system that is {a_type(system)}; it must be a text")
    first = messages[0]
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": system}, *messages]
    if first["content"].strip() != system.strip():
        raise ConversationError("has system, and messages that begin with another system message: leave one out")
    return messages


def from_other_forms(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ShareGPT's ``conversations`` and Alpaca's ``instruction``, ``input``, ``output`` as ``messages``.

    Source: of the latter, LLaMA-Factory, which puts the input in a line behind the instruction.
    """
    if any(sample.get(key) is not None for key in ("messages", "completion", "chosen", "rejected", "text")):
        return sample
    if sample.get("conversations") is not None:
        turns = from_json(sample["conversations"], "conversations")
        if isinstance(turns, list) and turns:
            turns = [_of_sharegpt(each) for each in turns]
        return {**{key: value for key, value in sample.items() if key != "conversations"}, "messages": turns}
    asked, answer = sample.get("instruction"), sample.get("output")
    if not isinstance(asked, str) or not isinstance(answer, str):
        return sample
    if not is_empty(sample.get("history")):
        raise ConversationError("has history, which is not read beside instruction and output: give messages")
    more = sample.get("input")
    if not is_empty(more) and not isinstance(more, str):
        raise ConversationError(f"has input that is {a_type(more)}; it must be a text")
    content = "\n".join(each for each in (asked, more) if each)
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    rest = {key: value for key, value in sample.items() if key not in ("instruction", "input", "output", "history")}
    return {**rest, "messages": turns}


def _of_sharegpt(turn: Any) -> Any:
    if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
        return turn
    role = turn["from"]
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    return {**rest, "role": SHAREGPT.get(role, role) if isinstance(role, str) else role, "content": turn["value"]}


def _message(message: Any, name: str) -> Message:
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
        shown = f"has the keys {', '.join(message)}" if isinstance(message, dict) else f"is {a_type(message)}"
        raise ConversationError(f"{name} must have role and content, it {shown}")
    if role not in ROLES:
        raise ConversationError(f"{name} has role {role!r}; allowed: {', '.join(ROLES)}")
    content, calls = message.get("content"), from_json(message.get("tool_calls"), f"{name}.tool_calls")
    if isinstance(content, list):
        if not all(isinstance(each, dict) and isinstance(each.get("text"), str) for each in content):
            raise ConversationError(f"{name} has content that is not text, which cannot be trained on: leave it out")
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
    found = {**{k: v for k, v in message.items() if v is not None}, "content": content or ""}
    return found if calls is None else {**found, "tool_calls": calls}
