"""Say it when this process waits for another one's build of an extension: a build that was killed leaves its lock.

torch, which compiles DeepSpeed's extensions at their first use, would wait in silence, and for ever.
"""

from __future__ import annotations

import os
import sys
from time import monotonic, sleep

from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

PATIENCE = 20.0  # seconds


class TellingBaton(FileBaton):
    """torch's lock of a build; the first rank of a host says for what it waits."""

    def wait(self) -> None:
        end, told = monotonic() + PATIENCE, os.environ.get("LOCAL_RANK", "0") != "0"
        while os.path.exists(self.lock_file_path):
            if not told and monotonic() > end:
                told = True
                print(
                    f"waiting for {self.lock_file_path}: another process builds an extension, or one was killed in it; "
                    f"if nothing is being compiled, delete this file",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
            sleep(self.wait_seconds)


cpp_extension.FileBaton = TellingBaton
