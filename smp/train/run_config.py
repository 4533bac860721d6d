"""Settings of a run as a whole."""

from __future__ import annotations

import dataclasses

from smp.config import AUTO, Auto, Section, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """Length of the run, batch, output and planning."""

    output_dir: str | None = setting(
        None, "Run directory: configuration, metrics, logs, checkpoints. Default: runs/<model>."
    )
    max_steps: int | None = setting(
        None, "Optimizer steps to train. Default: 5000, or as many as --epochs needs.", minimum=1,
        aliases=("max_training_steps",),
    )  # fmt: skip
    epochs: int | None = setting(
        None, "Passes over the data; training ends at whichever of this and --max_steps is first.", minimum=1
    )
    train_batch_size: int = setting(2, "Samples per forward pass on each data-parallel rank.", minimum=1)
    gradient_accumulation_steps: int = setting(1, "Forward passes per optimizer step.", minimum=1)
    global_batch_size: int | None = setting(
        None,
        "Samples per optimizer step over all ranks; the number of forward passes follows. "
        "Default: train_batch_size x data ranks x gradient_accumulation_steps.",
        minimum=1,
    )
    seed: int = setting(12345, "Seed of initial values, data order and dropout.", minimum=0, maximum=2**63 - 1)
    deterministic: bool = setting(
        False,
        "Take kernels that give the same bits each time (torch.use_deterministic_algorithms); on GPUs attention's "
        "backward is slower then, and an operation that has no such kernel ends the run with torch's error.",
    )
    dry_run: bool = setting(False, "Check everything, print the memory each rank needs, and stop.")
    dry_run_world_size: int | None = setting(
        None,
        "Number of processes to plan for with --dry_run 1, on other machines: GPUs and files may be there alone. "
        "Default: those started.",
        minimum=1,
        maximum=65536,
    )
    plan: bool = setting(
        False,
        "Predict memory and step time before the start, by a process of its own that has 20 s: plan.json, and after "
        "step 20 plan_error.json, in the run directory. Changes nothing of the run. With --dry_run 1 it is printed.",
    )
    gc_freq: int | Auto = setting(
        AUTO,
        "Steps between Python's garbage collections, by all ranks together. 0: whenever Python decides. auto: 50 on "
        "GPUs.",
        minimum=0,
        plain=0,
    )
    profile_nsys: bool = setting(False, "Start the CUDA profiler (nsys) at the third step; needs a GPU.")

    def problems(self) -> list[str]:
        """Add settings that need or exclude one another."""
        found = super().problems()
        if self.dry_run_world_size is not None and not self.dry_run:
            found.append("--dry_run_world_size has a meaning only with --dry_run 1: add it, or leave it out")
        if self.global_batch_size is not None and self.gradient_accumulation_steps > 1:
            found.append(
                f"--global_batch_size {self.global_batch_size} and --gradient_accumulation_steps "
                f"{self.gradient_accumulation_steps} set the same thing: give one of them"
            )
        return found
