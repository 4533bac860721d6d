"""The other columns of a conversation's row: what is read, what is refused by name, and what is only named."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from smp.data.messages import (
    CALLS,
    TRAINED,
    ConversationError,
    NotTextError,
    form_of,
    from_json,
    from_other_forms,
    is_empty,
)
from smp.data.rows import is_unread

SYSTEM = ("system", "system_prompt")
CONTEXT = ("tools", *SYSTEM, "documents", "chat_template_kwargs")  # of messages
PAIR = ("prompt", "chosen", "rejected")
NOT_TEXT = ("image", "images", "video", "videos", "audio", "audios")
INSTEAD = {
    "tool_defs": "rename it to tools", "functions": 'give "tools": [{"type": "function", "function": ...}]',
    "function_call": f"give {CALLS}",
}  # fmt: skip
KEYS = ("role", "content", "from", "value", *TRAINED)  # that are read of a message
REASONING = {"reasoning", "reasoning_content", "thinking"}  # each is given to templates as all
UNDESIRED = ("label", "kto_tag")  # false in rows of KTO, TRL's and LLaMA-Factory's
WEIGHTS = ("weight", "loss_weight")  # of a row; its loss, train and the like may be metrics and splits


def refuse_columns(row: Mapping[str, Any], name: str = "", *, pairs: bool = False) -> None:
    """Refuse a row, or a message ``name`` of it, with a column that changes what it says or what is trained on.

    Raises:
        ConversationError: naming the column.
    """
    has, form = f"{name} has" if name else "has", () if name else PAIR if pairs else form_of(row)
    for key, value in row.items():
        number = _number(value)
        if key in UNDESIRED and number == 0 and not name and form != ("text",):
            shown = str(value).strip().lower()
            if shown == "false" or form == ("prompt", "completion"):  # with messages 0 may be a class
                raise ConversationError(
                    f"has {key} {shown}, which marks an answer that is not desired, as KTO's do: leave the row out, or "
                    f"{key} where it says something else"
                )
        of_loss = is_unread(key) and key not in TRAINED if name else (key in WEIGHTS or is_unread(key)) and number != 1
        if of_loss and (number is not None or not is_empty(value)):
            raise ConversationError(
                f'{has} {key} beside the texts, which is not read: remove it; "train": false in a message leaves its '
                f"turn out of training"
            )
        if is_empty(value):
            continue
        if key in NOT_TEXT:
            raise NotTextError(
                f"{has} {key}, and only text can be trained on: leave the row out, or {key} where the text needs none"
            )
        if key in INSTEAD and form != ("text",):
            raise ConversationError(f"{has} {key}, which is not read: {INSTEAD[key]}")


def _number(value: Any) -> float | None:
    """Return a number or a truth value, which in CSV is a text."""
    text = str(value).strip().lower() if isinstance(value, (int, float, str)) else ""
    with contextlib.suppress(ValueError):
        return float({"false": 0, "true": 1}.get(text, text))
    return None


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
                found.update({column: None} if _says(value) else {})
            elif column == "chat_template_kwargs" or (column not in CONTEXT and isinstance(value, list)):
                inner = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, dict)]
                names = [key for each in inner for key, item in each.items() if _says(item)]
                found.update({f"{column}.{key}": None for key in names if key not in words})
    return list(found)


def _says(value: Any) -> bool:
    return value is False or not is_empty(value)


def read_by(sample: Mapping[str, Any], *, pairs: bool) -> tuple[str, ...]:
    """Return the columns that are read of a sample, by its form."""
    form = PAIR if pairs else form_of(sample)
    texts = form == ("text",) or ("prompt" in form and isinstance(sample.get("prompt"), str))
    if texts and not (pairs and isinstance(sample.get("chosen"), list)):
        return form
    return (*form, *CONTEXT, *(("input",) if "instruction" in form else ()))


def lacks_system(sample: Mapping[str, Any], *, pairs: bool) -> bool:
    """Return whether the messages of a sample that can be encoded begin with no system message."""
    if pairs:
        turns = sample["prompt"] if isinstance(sample.get("prompt"), list) else sample["chosen"]
    else:
        found = from_other_forms(sample)
        turns = from_json(found[form_of(found)[0]], "messages")
    return turns[0]["role"] not in ("system", "developer")
