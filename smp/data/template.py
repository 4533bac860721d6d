"""Chat templates: where they come from, and how they are rendered."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smp.data.messages import ConversationError, Message
from smp.errors import UserError, hub_advice

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Some templates print today's date: here the one that Llama's takes without a clock, as a file keeps its tokens.
FIXED_DATE = "{%- macro strftime_now(format) -%}26 Jul 2024{%- endmacro -%}"
RENDER_SECONDS = 10.0  # of computing: a conversation takes milliseconds


def given_template(name: str) -> str:
    """Return the chat template that ``--chat_template`` names: ``chatml``, a file, or that of a model's directory.

    Raises:
        UserError: there is none.
    """
    if name == "chatml":
        return CHATML
    path = Path(name).expanduser()
    try:
        if not path.is_dir():
            return path.read_text(encoding="utf-8")
        if (file := path / "chat_template.jinja").is_file():
            return file.read_text(encoding="utf-8")
        if (file := path / "tokenizer_config.json").is_file():
            found = json.loads(file.read_text(encoding="utf-8"))
            if isinstance(found, dict) and isinstance(template := found.get("chat_template"), str):
                return template
    except (OSError, ValueError) as error:  # no text, or no JSON
        raise UserError(f"--chat_template {name} cannot be read: {error}{hub_advice(name)}") from error
    raise UserError(
        f"--chat_template {name} is a directory without a chat template (chat_template.jinja, or one in "
        f"tokenizer_config.json): give that of a chat model, a file, or chatml"
    )


def render(template: str, messages: list[Message], *, prompt: bool, **given: Any) -> str:
    """Return the text that a template makes of messages, with the generation prompt behind them or not.

    Raises:
        ConversationError: the template fails, or does not come to an end.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        with _limited():
            rendered: Any = render_jinja_template(
                conversations=[messages], chat_template=FIXED_DATE + template, add_generation_prompt=prompt, **given
            )
        return str(rendered[0][0])
    except _TooLongError:
        raise ConversationError(
            f"the chat template computes for more than {RENDER_SECONDS:g} seconds, as one that loops without end: mend "
            f"it, or give another one by --chat_template FILE"
        ) from None
    except Exception as error:  # of any type: templates raise their own, and fail on what they do not expect
        raise ConversationError(f"the chat template refuses it: {error}") from error


class _TooLongError(BaseException):
    """The time for rendering is over; no ``except Exception`` on the way ends it."""


def _interrupt(_number: int, _frame: object) -> None:
    raise _TooLongError


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Interrupt what computes for too long, which Python can in its main thread: the job's, or a worker process's.

    The timer counts the CPU time of all of the process's threads.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGVTALRM, _interrupt)
    timer = signal.setitimer(signal.ITIMER_VIRTUAL, RENDER_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, former)
        signal.setitimer(signal.ITIMER_VIRTUAL, *timer)
