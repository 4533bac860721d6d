"""What ``auto`` means for communication, and why."""

from __future__ import annotations

import pytest

from smp.config import ParallelConfig, Settings
from smp.parallel import sharding, tensor
from smp.parallel.choices import Choice, Situation
from smp.parallel.tensor import technique


def situation(*, accumulation: int = 1, fits: bool = True, **parallel) -> Situation:
    return Situation(None, Settings((ParallelConfig(**parallel),)), "cuda", accumulation, lambda **values: fits)


def test_parameters_stay_gathered_between_microbatches_where_they_fit():
    name = "reshard_between_microbatches"
    assert [*sharding.choose(situation())] == [Choice(name, True, "a step has one micro-batch")]
    many = "all gathered parameters fit, for the 4 micro-batches of a step"
    assert [*sharding.choose(situation(accumulation=4))] == [Choice(name, False, many)]
    few = "all gathered parameters at once do not fit"
    assert [*sharding.choose(situation(accumulation=4, fits=False))] == [Choice(name, True, few)]


@pytest.mark.parametrize(
    ("why", "change", "chosen", "reason"),
    [
        ("", {}, True, "the GPUs of tensor-parallel ranks read each other's memory"),
        ("", {"sequence_parallel": False}, False, "no sequence parallelism"),
        ("", {"fits": False}, False, "the buffers do not fit"),
        ("no peer access between the GPUs of ranks 0 and 1", {}, False, None),
    ],
)
def test_exchanges_overlap_where_gpus_read_each_other(why, change, chosen, reason, monkeypatch):
    asked = []
    monkeypatch.setattr(technique, "overlap_obstacle", lambda *given: asked.append(given) or why)
    found = [*tensor.choose(situation(tensor_parallel_degree=8, **change))]
    assert found == [Choice("tp_overlap", chosen, reason or why)]
    assert asked == ([] if "sequence_parallel" in change else [(8, "cuda")])
    assert [*tensor.choose(situation())] == []  # nothing is split
