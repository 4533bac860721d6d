"""Settings of checkpoints and of the final model."""

from __future__ import annotations

import dataclasses
from typing import Literal

from smp.config import Section, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """When and where checkpoints are written, which are kept, what to resume from, and the final model."""

    checkpoint_freq: tuple[int, ...] = setting(
        (1000,), "Steps between checkpoints; one number per directory.", minimum=1
    )
    num_kept_checkpoints: tuple[int, ...] = setting(
        (2,), "Newest checkpoints kept; one number per directory.", minimum=1
    )
    checkpoint_dir: tuple[str, ...] = setting(
        (), "Directories to write checkpoints to, each with its own frequency. Default: <output_dir>/checkpoints."
    )
    checkpoint_type: Literal["sharded", "local", "async_sharded", "async_local"] = setting(
        "sharded", "How checkpoints are written.", only=("sharded",),
        otherwise="asynchronous and local checkpoints are not in this version; use sharded",
    )  # fmt: skip
    resume_from_checkpoint: str | None = setting(
        None, "Checkpoint directory to resume from; 'latest': the newest of this run, or a fresh start if it has none."
    )
    save_final_model: bool = setting(False, "Write a Hugging Face model directory at the end.")
    model_dir: str | None = setting(None, "Where the final model goes. Default: <output_dir>/final.")

    def problems(self) -> list[str]:
        """Adds lists of different lengths."""
        found = super().problems()
        lengths = (len(self.checkpoint_freq), len(self.num_kept_checkpoints))
        directories = max(1, len(self.checkpoint_dir))
        if lengths != (directories, directories):
            found.append(
                f"--checkpoint_dir, --checkpoint_freq and --num_kept_checkpoints must have one value per directory: "
                f"got {directories}, {lengths[0]} and {lengths[1]} values"
            )
        for directory in (*self.checkpoint_dir, self.model_dir):
            if directory is not None and "://" in directory:
                found.append(
                    f"{directory}: checkpoints and models on object stores are not in this version; "
                    f"give a directory of a file system that all processes share"
                )
        return found
