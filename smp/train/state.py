"""Progress of a run, the few numbers that, with parameters, optimizer and RNG, make it resumable; where it starts."""

from __future__ import annotations

import dataclasses

from smp.checkpoint.restore import Candidate


@dataclasses.dataclass
class TrainState:
    """Progress of a run.

    Attributes:
        step: optimizer updates done.
        samples: global samples consumed, which is the position in the data stream.
        tokens: valid (predicted) tokens consumed over all ranks.
        skipped: steps whose update was left out, as its numbers were not finite.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    skipped: int = 0


@dataclasses.dataclass(frozen=True)
class Start(Candidate):
    """A checkpoint to resume from, or none, and what it decides of a run.

    Attributes:
        progress: where the run begins.
        global_batch_size: samples of a step over all ranks.
        max_steps: the step to stop at.
    """

    progress: TrainState
    global_batch_size: int
    max_steps: int
