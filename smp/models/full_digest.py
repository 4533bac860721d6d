"""The digest of all bytes of pretrained weights, made once for each state of their files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import re
import threading
from typing import Any

import xxhash

from smp.environment import cache_folder
from smp.errors import UserError
from smp.models.weight_files import weight_map

_PIECE = 4 << 20


class FullDigest:
    """Digest of all bytes of the files of weights as they were when this was made.

    It is kept in ``~/.cache/smp/weights``, by the files' paths, sizes, ``mtime`` and ``ctime``, of which no program can
    set the last.

    Args:
        weights: as for :func:`smp.models.weight_files.find_weights`.

    Attributes:
        value: None: not known yet.
        expected: what a checkpoint says that it is; None: nothing.
    """

    def __init__(self, weights: pathlib.Path):
        self._files, self._begun = sorted(set(weight_map(weights).values())), False
        self._state = self._stat()
        self.value, self.expected = self._kept(), None

    def __deepcopy__(self, _memo: Any) -> FullDigest:
        return self  # a copied model has the same weights

    @property
    def differs(self) -> bool:
        """Return whether the weights are known to be others than expected."""
        return None not in (self.value, self.expected) and self.value != self.expected

    @property
    def is_compared(self) -> bool:
        """Return whether nothing is expected, or it is known whether that is so."""
        return self.expected is None or self.value is not None

    def begin(self) -> bool:
        """Have a thread find it, which ends with the process; returns whether there is something to find."""
        if self._begun or self.value is not None:
            return False
        self._begun = True
        threading.Thread(target=self._try, daemon=True).start()
        return True

    def _try(self) -> None:
        with contextlib.suppress(OSError):  # without it, checkpoints have the digest of samples
            self.find()

    def find(self) -> str | None:
        """Return it, and read all files where it is not kept; None: they have changed meanwhile.

        Raises:
            OSError: a file cannot be read.
        """
        if self.value is None:
            found, buffer = xxhash.xxh3_128(), memoryview(bytearray(_PIECE))
            for file in self._files:
                found.update(f"{file.name} {file.stat().st_size}\n".encode())
                with file.open("rb", buffering=0) as content:
                    while count := content.readinto(buffer):
                        found.update(buffer[:count])
            if self._stat() == self._state:
                self._keep(digest := f"xxh3_128:{found.hexdigest()}")
                self.value = digest
        return self.value

    def _stat(self) -> str:
        found = ((os.path.realpath(file), file.stat()) for file in self._files)
        return repr([(path, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for path, s in found])

    def _path(self) -> pathlib.Path:
        return cache_folder("weights") / hashlib.sha256(self._state.encode()).hexdigest()[:20]

    def _kept(self) -> str | None:
        with contextlib.suppress(OSError, ValueError, UserError):
            found = self._path().read_text()
            return found if re.fullmatch("xxh3_128:[0-9a-f]{32}", found) else None  # a power cut may have cut it
        return None

    def _keep(self, digest: str) -> None:
        with contextlib.suppress(OSError, UserError):  # each run finds it anew
            path = self._path()
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f"{path.name}.{os.getpid()}")
            partial.write_text(digest)
            partial.replace(path)
