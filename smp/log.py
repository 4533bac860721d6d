"""Logging: SMP v2's format, one console for the job, a file per rank, secrets redacted in both.

All loggers are below ``smp``. Importing adds no handler, so that a program that uses smp as a library gets smp's
records in its own logging; :func:`configure_logging` is for smp's own programs.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import sys
import time
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from smp.errors import UserError

# `logger.info(..., extra=FILE_ONLY)`: a record for the log file, which the console leaves out.
FILE_ONLY = {"file_only": True}

LINE_FORMAT = "%(asctime)s %(levelname).1s [%(filename)s:%(lineno)d] %(message)s"
DATE_FORMAT = "%Y-%m-%d %H:%M:%S"
HIDDEN = "***"

# Names of secrets, without text_key and those of tokens (eos_token, tokens, flops_per_token). A look-ahead over the
# whole name, so that long names without a match cost one pass.
_SECRET_NAME = (
    r"(?!text_key\b)(?!(?:bos|eos|pad|unk|sep|cls|mask|additional_special)_token\b)(?!\w*per_token\b)"
    r"(?=[\w.-]*?(?:(?:secret|password|passwd|passphrase|credential|signature)[\w.-]*"
    r"|token|(?:api|access|auth|account|private|storage|encryption)key|[_-](?:key|pwd|sig))(?![\w.-]))[\w.-]++"
)
_VALUE = r"(?:\"[^\"]*\"|'[^']*'|[^\s,;&\"'(){}\[\]]+)"
# Nor what a sentence goes on with: "no special token: a model ...".
_NOT_SECRET = r"(?!(?:None|null|True|False|true|false)\b)(?!(?:an?|the|of|set|give|use|it|no|not)\s+[\w~-])"
_RULES = [
    # name=value, "name": "value", name : value
    (re.compile(rf"(?<![\w.-])({_SECRET_NAME}[\"']?\s*(?:=|:(?!//))\s*){_NOT_SECRET}{_VALUE}", re.IGNORECASE), True),
    # --name value
    (re.compile(rf"((?<![\w.-])--(?=[a-z]){_SECRET_NAME}\s+){_NOT_SECRET}(?!--){_VALUE}", re.IGNORECASE), True),
    # scheme://user:password@host; keys of AWS have slashes, a port before one is none
    (re.compile(r"(\w://[^\s/:@]*:)(?!\d+/)[^\s@]{1,256}+(?=@)"), True),
    # Authorization: Bearer value
    (re.compile(r"(\bBearer\s+|\bAuthorization[\"']?\s*[:=]\s*[\"']?Basic\s+)[\w.~+/=-]+", re.IGNORECASE), True),
    # Tokens of Hugging Face, AWS and GitHub, known by their prefix.
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}\b"), False),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b"), False),
    (re.compile(r"\b(?:gh[pousr]_|github_pat_)\w{16,}\b"), False),
]


def redact(text: str) -> str:
    """Replace the values of secrets in ``text`` by ``***``.

    Secrets are: the value of a key that looks like a token, secret, password or key, in ``key=value``,
    ``"key": "value"`` and ``--key value``; the password of a URL; Hugging Face tokens, AWS access keys, GitHub tokens.
    """
    for pattern, keeps_name in _RULES:
        text = pattern.sub(rf"\g<1>{HIDDEN}" if keeps_name else HIDDEN, text)
    return text


def redacted(value: Any) -> Any:
    """Return JSON with the values of secrets in its texts replaced by ``***``, also those that a key tells."""
    if isinstance(value, dict):
        hidden = {k for k, each in value.items() if isinstance(each, str) and each and redact(f"{k}=x")[-1] != "x"}
        return {redact(str(key)): HIDDEN if key in hidden else redacted(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted(each) for each in value]
    return redact(value) if isinstance(value, str) else value


class _Formatter(logging.Formatter):
    """Redacts the formatted line, which includes a traceback, as a filter of records would not."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class _ForPeople(_Formatter):
    """Lines of a terminal: the time of day and the message; the level where it is a warning or an error."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Format without what only a search of a log file needs."""
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {level}{record.message}"


def prepare_streams() -> None:
    """Make the standard streams of a program accept whatever is printed.

    What an encoding lacks is escaped. A closed stream becomes ``/dev/null``: a file opened later would else get its
    descriptor, and what is written to that.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal with columns; those of mpirun and ``docker run -t`` may have none."""
    try:
        return stream is not None and os.get_terminal_size(stream.fileno()).columns > 0
    except (OSError, ValueError):  # no terminal, no file, or closed
        return False


class _Console(logging.StreamHandler[TextIO]):
    """Standard output, without the records for the log file alone; on a terminal above any progress bar."""

    def __init__(self, prefix: str):
        super().__init__(sys.stdout)
        self._terminal = is_terminal(sys.stdout)
        formatter = _ForPeople() if self._terminal and not prefix else _Formatter(prefix + LINE_FORMAT, DATE_FORMAT)
        self.setFormatter(formatter)
        self.addFilter(lambda record: not getattr(record, "file_only", False))

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line; a bar is cleared before, and drawn again below it."""
        if not self._terminal:
            super().emit(record)
            return
        with contextlib.suppress(OSError), tqdm.external_write_mode(self.stream):  # a terminal that has gone
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Leave a line that cannot be written, as to a closed pipe, to the log file; tell any other error."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _File(logging.FileHandler):
    """A rank's log file; on a full disk one warning, and no traceback for each line."""

    def __init__(self, path: Path):
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self.setFormatter(_Formatter(LINE_FORMAT, DATE_FORMAT))
        self._warned = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Warn, once, on the console of the rank if it has one."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._warned:
            self._warned = True  # first: the warning comes here, too
            logging.getLogger("smp").warning(
                "%s cannot be written (%s): lines are left out of it.", self.baseFilename, error.strerror
            )

    def close(self) -> None:
        """Close the file; what it has no room for is lost."""
        with contextlib.suppress(OSError):
            super().close()


def begin_line() -> None:
    """Erase a progress bar, of whichever process, from the terminal's line before a message to standard error."""
    with contextlib.suppress(OSError):
        if os.isatty(2):
            os.write(2, b"\r\033[K")


def say(text: str) -> None:
    """Write a line to standard error without locks and buffers: for threads that may have to end the process."""
    begin_line()
    with contextlib.suppress(OSError):  # a closed pipe or a full disk
        os.write(2, f"{text}\n".encode())


def get_logger(name: str) -> logging.Logger:
    """Return the logger ``name`` below ``smp``: ``smp.loss`` as it is, ``script`` as ``smp.script``."""
    return logging.getLogger(name if name == "smp" or name.startswith("smp.") else f"smp.{name}")


def _consoles(rank: int, local_rank: int, world_size: int) -> list[logging.Handler]:
    if local_rank != 0:
        return []
    console = _Console("" if rank == 0 else f"[rank {rank}/{world_size}] ")
    console.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    return [console]


def log_to_console(*, rank: int, local_rank: int, world_size: int) -> None:
    """Send smp's records to the console as :func:`configure_logging` does, and to no file."""
    logger = logging.getLogger("smp")
    for handler in _consoles(rank, local_rank, world_size) or [logging.NullHandler()]:
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def configure_logging(*, rank: int, local_rank: int, world_size: int, log_dir: Path | None) -> None:
    """Send smp's records to the console and to a file; a second call replaces the first.

    The console gets rank 0's lines from INFO on, and from the other hosts' local rank 0 warnings and errors, marked
    with the rank; short lines on a terminal, elsewhere SMP v2's format. Every rank appends all its lines to
    ``log_dir/rank<k>.log``, with those from before the call.

    Raises:
        UserError: the log file cannot be written.
    """
    handlers: list[logging.Handler] = _consoles(rank, local_rank, world_size)
    if log_dir is not None:
        path = log_dir / f"rank{rank}.log"
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
            handlers.append(_File(path))
        except OSError as error:
            raise UserError(
                f"cannot write the log file {path} ({error.strerror}): choose an --output_dir you may write to"
            ) from error
    logger = logging.getLogger("smp")
    kept = next((handler for handler in logger.handlers if isinstance(handler, MemoryHandler)), None)
    kept = MemoryHandler(sys.maxsize, flushLevel=sys.maxsize) if kept is None else kept
    if log_dir is None:
        handlers.append(kept)
    else:
        kept.setTarget(handlers[-1])
        kept.flush()
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        if handler is not kept:
            handler.close()
    for handler in handlers:
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
