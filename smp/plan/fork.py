"""A call in a fork of this process."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable
from typing import Any

from smp.errors import UserError


def in_child(call: Callable[[], Any]) -> Any:
    """Return the result of a call made in a fork of this process: torch keeps caches of meshes and of shapes.

    Raises:
        UserError: the call raised it, or has failed.
    """
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            try:
                answer: tuple[bool, Any] = (True, call())
            except UserError as error:
                answer = (False, str(error))
            except BaseException as error:
                traceback.print_exc()
                name = type(error).__name__
                answer = (
                    False,
                    f"this layout could not be planned ({name}): this is a defect in smp, please report it",
                )
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(answer, pipe)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        written = pipe.read()
    _, status = os.waitpid(child, 0)
    if not written:
        raise UserError(f"the process that planned this layout has ended with status {status}: see its output above")
    done, result = pickle.loads(written)
    if not done:
        raise UserError(result)
    return result
