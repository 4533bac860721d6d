"""Pairs of answers, of which one is preferred: TRL's forms of preference data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from smp.data.columns import CONTEXT, refuse_columns
from smp.data.conversation import Chat
from smp.data.messages import ConversationError

Encoded = tuple[np.ndarray, np.ndarray]


def encode_pair(chat: Chat, sample: Mapping[str, Any]) -> list[Encoded]:
    """Return ids and labels, as :meth:`smp.data.conversation.Chat.encode`'s, of the chosen and the rejected answer.

    Args:
        chat: of the tokenizer.
        sample: ``prompt``, ``chosen`` and ``rejected``, all texts or all messages, with messages also ``CONTEXT``; or
            ``chosen`` and ``rejected`` as complete conversations, whose common beginning is the prompt.

    Raises:
        ConversationError: it is none of these, both answers are the same, or one has nothing that could be compared.
    """
    refuse_columns(sample, pairs=True)
    for key in ("chosen", "rejected"):
        if sample.get(key) is None:
            raise ConversationError(
                f"is no pair: it has no {key}; keys found: {', '.join(sample) or 'none'}; --dpo 1 needs prompt, chosen "
                f"and rejected"
            )
    prompt, chosen, rejected = _split(sample)
    if chosen == rejected:
        raise ConversationError("has the same answer as chosen and as rejected: leave it out")
    context = {key: sample[key] for key in CONTEXT if key in sample}
    found = []
    for key, answer in (("chosen", chosen), ("rejected", rejected)):
        try:
            ids, labels = chat.encode({**context, "prompt": prompt, "completion": answer})
        except ConversationError as error:
            raise ConversationError(f"{key}: {error}") from error
        if not (labels[1:] != -100).any():
            raise ConversationError(f"{key} has no answer of the assistant to compare: leave it out")
        found.append((ids, labels))
    return found


def _split(sample: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return prompt, chosen and rejected answer, all texts or all messages."""
    prompt, chosen, rejected = sample.get("prompt"), sample["chosen"], sample["rejected"]
    if all(isinstance(each, str) for each in (prompt, chosen, rejected)):
        return prompt, chosen, rejected
    if not (isinstance(chosen, list) and isinstance(rejected, list) and chosen and rejected):
        raise ConversationError(
            "must have prompt, chosen and rejected as texts, or as lists of messages that are not empty"
        )
    if isinstance(prompt, list):
        for key, answer in (("chosen", chosen), ("rejected", rejected)):
            first = answer[0].get("role") if answer and isinstance(answer[0], dict) else None
            if first in ("system", "developer", "user"):
                raise ConversationError(
                    f"{key} begins with a message of {first}, and must continue prompt: leave prompt out where both "
                    f"are complete conversations"
                )
        return prompt, chosen, rejected
    # Complete conversations; a prompt that is a text repeats one of their messages, as in some data sets.
    same = 0
    while same < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
        same += 1
    if not same and isinstance(prompt, str):
        raise ConversationError("has prompt as a text, and chosen and rejected as messages: give prompt as messages")
    if not same:
        raise ConversationError("has no prompt: chosen and rejected begin with different messages")
    said = [each.get("content") for each in chosen[:same] if isinstance(each, dict)]
    if isinstance(prompt, str) and not any(isinstance(each, str) and each.strip() == prompt.strip() for each in said):
        raise ConversationError("has a prompt that is no message of chosen and rejected: leave it out, or them apart")
    if same == min(len(chosen), len(rejected)) and chosen != rejected:
        raise ConversationError("has an answer that begins with all of the other: they cannot be compared")
    return chosen[:same], chosen[same:], rejected[same:]
