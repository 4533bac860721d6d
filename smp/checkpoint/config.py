"""Settings of checkpoints and of the final model."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Literal

from smp.checkpoint.object_store import is_url
from smp.config import Section, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """When and where checkpoints are written, which are kept, what to resume from, and the final model."""

    checkpoint_freq: tuple[int | Literal["auto"], ...] = setting(
        (1000,),
        "Steps between checkpoints; one number per directory. auto: from measured times, see --checkpoint_overhead.",
        minimum=1,
    )
    checkpoint_overhead: float = setting(
        0.03, "Share of the time that --checkpoint_freq auto may spend on saving.", above=0, maximum=1
    )
    num_kept_checkpoints: tuple[int, ...] = setting(
        (2,), "Newest checkpoints kept; one number per directory.", minimum=1
    )
    keep_best: int = setting(
        0, "Checkpoints of the lowest validation loss kept beside the newest; needs --validation_freq.", minimum=0
    )
    checkpoint_dir: tuple[str, ...] = setting(
        (),
        "Directories to write checkpoints to, each with its own frequency; or URLs (s3://...), which they are uploaded "
        "to while training continues. Default: <output_dir>/checkpoints.",
    )
    checkpoint_type: Literal["sharded", "local", "async_sharded", "async_local", "use_pg_with_util"] = setting(
        "sharded",
        "sharded: one checkpoint on a file system that all hosts see, for any layout. local: each rank's own, on its "
        "own disk, for the same layout. async_: training continues while it is written. use_pg_with_util: as sharded.",
    )
    verify_checkpoint: Literal["full", "size"] = setting(
        "full", "What resuming checks: the content of every file, or names and sizes only."
    )
    read_back: Literal["async", "always", "never"] = setting(
        "async",
        "Read every file once more before a checkpoint is published: of asynchronous ones, whose write nobody waits "
        "for; always; never.",
    )
    on_save_error: Literal["stop", "continue"] = setting(
        "stop", "When a checkpoint cannot be written: end the run, or train on and try at the next one."
    )
    resume_from_checkpoint: str | None = setting(
        None,
        "Checkpoint directory or its URL to resume from; 'latest': the newest valid one of this run, or a fresh "
        "start if there is none.",
    )
    checkpoint_cache_dir: str | None = setting(
        None,
        "Directory that all ranks share, to copy the checkpoint at a URL to that is resumed from. Default: it is read "
        "there, each rank what it needs.",
    )
    reset_progress: bool = setting(
        False,
        "Take the parameters and the optimizer's state of --resume_from_checkpoint, a job's or a script's, and begin "
        "data, schedule and generators anew.",
    )
    save_final_model: bool = setting(False, "Write a Hugging Face model directory at the end.")
    dtype: str | None = setting(
        None,
        "Dtype of the final model's files, fp32 or bf16. Default: that of the pretrained files, else --param_dtype's.",
        only=(None, "fp32", "bf16"),
        otherwise="it is the dtype of the final model's files, fp32 or bf16; --bf16 1 computes in bfloat16",
    )
    export_text_only: bool = setting(
        False,
        "Of a text model that was finetuned from a directory of a larger one, such as a vision-language model, write "
        "the text model alone. Default: the larger model, with all else as it was.",
    )
    model_dir: str | None = setting(
        None, "Directory or URL where --save_final_model 1 writes to. Default: <output_dir>/final."
    )

    @property
    def is_local(self) -> bool:
        """True if each rank stores its part of a checkpoint in a directory of the rank."""
        return self.checkpoint_type.endswith("local")

    @property
    def is_async(self) -> bool:
        """True if training continues while a checkpoint is written."""
        return self.checkpoint_type.startswith("async_")

    def problems(self) -> list[str]:
        """Add lists of different lengths, and what contradicts itself."""
        found = super().problems()
        lengths = (len(self.checkpoint_freq), len(self.num_kept_checkpoints))
        directories = max(1, len(self.checkpoint_dir))
        if lengths != (directories, directories):
            found.append(
                f"--checkpoint_dir, --checkpoint_freq and --num_kept_checkpoints must have one value per directory: "
                f"got {directories}, {lengths[0]} and {lengths[1]} values"
            )
        urls = [location for location in self.checkpoint_dir if is_url(location)]
        locations = [p.rstrip("/") if is_url(p) else str(Path(p).resolve()) for p in self.checkpoint_dir]
        if len(set(locations)) != len(locations):
            found.append(
                f"--checkpoint_dir names a directory twice: {' '.join(self.checkpoint_dir)}; use different ones"
            )
        if self.is_local and min(self.num_kept_checkpoints, default=2) < 2:
            found.append(
                f"--num_kept_checkpoints must be at least 2 with --checkpoint_type {self.checkpoint_type}: a crash in "
                f"the middle of a save leaves ranks with different newest checkpoints"
            )
        at_url = bool(urls) if self.resume_from_checkpoint == "latest" else is_url(self.resume_from_checkpoint or "")
        if self.checkpoint_cache_dir is not None and not at_url:
            found.append(
                "--checkpoint_cache_dir is for a URL in --resume_from_checkpoint, or in --checkpoint_dir to resume the "
                "latest of: give one, or leave it out"
            )
        if self.reset_progress and self.resume_from_checkpoint in (None, "latest"):
            found.append(
                "--reset_progress 1 needs a path in --resume_from_checkpoint, as latest is this run's own: give the "
                "directory of a checkpoint of another run or of a script"
            )
        if self.model_dir is not None and not self.save_final_model:
            found.append("--model_dir needs --save_final_model 1: set it, or leave the directory out")
        if self.export_text_only and not self.save_final_model:
            found.append(
                "--export_text_only is of the final model and needs --save_final_model 1: set it, or leave it out"
            )
        if self.dtype is not None and not self.save_final_model:
            found.append(
                "--dtype is of the final model's files and needs --save_final_model 1: set it, or leave it out "
                "(--bf16 1 computes in bfloat16)"
            )
        if urls and self.is_local:
            found.append(
                f"--checkpoint_type {self.checkpoint_type} keeps checkpoints on each rank's own disk, and {urls[0]} is "
                f"one directory for all ranks: use --checkpoint_type {self.checkpoint_type.replace('local', 'sharded')}"
            )
        found += [
            f"--{flag} {url.partition('://')[0]}://... has a password in it, which logs would show: give "
            f"credentials in the environment"
            for flag, url in [*(("checkpoint_dir", url) for url in urls), ("model_dir", self.model_dir or "")]
            if re.search("://[^/@]*:[^/]*@", url)
        ]
        return found
