"""JSON lines: ``{"input_ids": [...], "attention_mask": [...], "labels": [...]}``, the last two optional, or
``{"text": "..."}``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from smp.data.rows import Reader
from smp.data.storage import DataFile, open_file
from smp.errors import UserError, a_type

CHUNK = 1 << 20  # bytes that are converted at once
ARRAY = "datasets.load_dataset('json', data_files='F.json')['train'].to_json('F.jsonl') writes an array so"
BOM = b"\xef\xbb\xbf"
# A row of more than ten million tokens. Without a bound, a small compressed file could hold one line of many gigabytes.
MAX_LINE = 64 << 20


def read_lines(_columns: tuple[str, ...], file: DataFile) -> Iterator[tuple[tuple[int, bytes], int]]:
    """Yield a file in blocks of complete lines: (number of the first line, lines), and the file's bytes read so far.

    Raises:
        UserError: a line is longer than ``MAX_LINE`` bytes.
    """
    with open_file(file) as (content, raw):
        number = 1
        while block := content.read(CHUNK):
            if not block.endswith(b"\n"):
                block += content.readline(MAX_LINE + 1)
            if len(block) > MAX_LINE:
                _refuse_long(file, number, block)
            yield (number, block), raw.tell()
            number += block.count(b"\n")


def _refuse_long(file: DataFile, number: int, block: bytes) -> None:
    for at, line in enumerate(block.split(b"\n"), number):
        if len(line) > MAX_LINE:
            raise UserError(f"{file.url}, line {at}: has more than {MAX_LINE >> 20} MiB; cut the row into several")


def objects_of(file: DataFile, chunk: tuple[int, bytes]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of lines, each with its file and line for messages, without blank lines.

    Raises:
        UserError: a line is not JSON, not UTF-8 or not an object.
    """
    first, block = chunk
    if first == 1:
        block = block.removeprefix(BOM)
    for number, line in enumerate(block.split(b"\n"), first):
        if not line.strip():
            continue
        where = f"{file.url}, line {number}"
        try:
            found = json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: not UTF-8 ({error.reason}); convert the file") from error
        except (ValueError, RecursionError) as error:
            reason = f"{error.msg}: column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
            advice = ARRAY if number == 1 and line.startswith(b"[") else "mend the line or remove it"
            raise UserError(
                f"{where}: not valid JSON ({reason}); each line must be one complete object: {advice}"
            ) from error
        if not isinstance(found, dict):
            advice = f": {ARRAY}" if isinstance(found, list) else ""
            raise UserError(
                f"{where}: contains {a_type(found)}; each line must be one object "
                f'such as {{"input_ids": [1, 2, 3]}} or {{"text": "..."}}{advice}'
            )
        yield where, found


LINES = Reader("jsonl", read_lines, objects_of)
