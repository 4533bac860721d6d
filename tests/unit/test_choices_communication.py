"""What ``auto`` means for communication, and why."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from smp.config import ParallelConfig, Settings
from smp.mesh import lay_out
from smp.parallel import context, sharding, tensor
from smp.parallel.choices import Choice, Situation
from smp.parallel.tensor import technique


def situation(*, accumulation: int = 1, fits: bool = True, model=None, **parallel) -> Situation:
    mesh = lay_out(shard=8, tp=parallel.get("tensor_parallel_degree", 1), cp=parallel.get("context_parallel_degree", 1))
    settings = Settings((ParallelConfig(**parallel),))
    return Situation(model, settings, "cuda", accumulation, lambda **values: fits, mesh)


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


@pytest.mark.parametrize(
    ("heads", "keys", "cp", "tp", "expected"),
    [
        (32, 8, 2, 1, "all_gather"),
        (32, 8, 4, 1, "all_gather"),
        (32, 8, 8, 1, "all_to_all"),
        (32, 8, 8, 8, "all_gather"),  # four heads of a tensor-parallel rank for eight ranks
        (32, 32, 2, 1, "all_gather"),  # as much either way
        (32, 32, 4, 1, "all_to_all"),
        (32, None, 4, 1, "all_to_all"),
    ],
)
def test_heads_are_exchanged_where_that_moves_less_than_keys(heads, keys, cp, tp, expected):
    model = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=keys)
    choice, *others = context.choose(situation(model=model, context_parallel_degree=cp, tensor_parallel_degree=tp))
    assert (choice.name, choice.value) == ("cp_comm_type", expected)
    assert choice.reason == f"a key has {heads // (keys or heads)} queries, and a sequence is split over {cp} ranks"
    # For which there is no choice: before others choose.
    assert [(other.name, other.value) for other in others] == [("attn_implementation", "sdpa"), ("compile", False)]
    assert [*context.choose(situation(model=model))] == []  # nothing is split
