"""What is beside a conversation in its row: what is read, what is refused by name, and what is only named."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from smp.data.messages import TRAINED, ConversationError, is_empty
from smp.data.rows import is_unread

CONTEXT = ("tools", "system", "documents", "chat_template_kwargs")  # of messages
FORMS = (("messages",), ("prompt", "completion"), ("text",), ("conversations",), ("instruction", "input", "output"))
PAIR = ("prompt", "chosen", "rejected")
NOT_TEXT = ("image", "images", "video", "videos", "audio", "audios")
RENAMED = {"tool_defs": "tools", "functions": "tools", "system_prompt": "system", "function_call": "tool_calls"}
KEYS = ("role", "content", "from", "value", *TRAINED)  # that are read of a message
REASONING = {"reasoning", "reasoning_content", "thinking"}  # each is given to templates as all
UNDESIRED = ("label", "kto_tag")  # false in rows of KTO, TRL's and LLaMA-Factory's


def refuse_columns(row: Mapping[str, Any], name: str = "") -> None:
    """Refuse a row, or a message ``name`` of it, with a column that changes what it says or what is trained on.

    Raises:
        ConversationError: naming the column.
    """
    has, is_text = f"{name} has" if name else "has", row.get("text") is not None
    for key, value in row.items():
        if is_empty(value):
            continue
        if key in NOT_TEXT:
            raise ConversationError(
                f"{has} {key}, and only text can be trained on: leave the row out, or {key} where the text needs none"
            )
        if key in RENAMED and not is_text:
            raise ConversationError(f"{has} {key}, which is not read: rename it to {RENAMED[key]}")
        if key in UNDESIRED and value is False and not (name or is_text):
            raise ConversationError(
                f"has {key} false, which marks an answer that is not desired, as KTO's do: leave the row out, or {key} "
                f"where it says something else"
            )
        obeyed = key in TRAINED and (name or (isinstance(value, (int, float)) and value == 1))
        if not obeyed and (key in TRAINED or is_unread(key)):
            raise ConversationError(
                f'{has} {key} beside the texts, which is not read: remove it; "train": false in a message leaves its '
                f"turn out of training"
            )


def unread(samples: Iterable[Mapping[str, Any]], template: str | None, *, pairs: bool) -> list[str]:
    """Return the columns of some samples that are not read, and the keys within them that the template does not name.

    Args:
        template: Jinja.
        pairs: the samples are pairs of answers.
    """
    words = {*re.findall(r"\w+", template or ""), *KEYS}
    words |= REASONING if words & REASONING else set()
    found: dict[str, None] = {}
    for sample in samples:
        read = read_by(sample, pairs=pairs)
        for column, value in sample.items():
            if column not in read:
                found.update({column: None} if not is_empty(value) else {})
            elif column == "chat_template_kwargs" or (column not in CONTEXT and isinstance(value, list)):
                inner = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, dict)]
                names = [key for each in inner for key, item in each.items() if not is_empty(item)]
                found.update({f"{column}.{key}": None for key in names if key not in words})
    return list(found)


def read_by(sample: Mapping[str, Any], *, pairs: bool) -> tuple[str, ...]:
    """Return the columns that are read of a sample, by its form."""
    form = PAIR if pairs else next((each for each in FORMS if sample.get(each[-1]) is not None), ())
    texts = form == ("text",) or ("prompt" in form and isinstance(sample.get("prompt"), str))
    return form if texts and not (pairs and isinstance(sample.get("chosen"), list)) else (*form, *CONTEXT)
