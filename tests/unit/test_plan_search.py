"""The search of a layout: what is legal, what the closed form leaves to the trace, the order, and the reasons."""

from __future__ import annotations

import dataclasses
import functools
import re

import pytest

from smp.config import Settings
from smp.errors import UserError
from smp.memory.shape import Trained, model_shape
from smp.models.model_config import resolve_model
from smp.parallel import lora
from smp.plan import request as plan_request
from smp.plan.cost import cost_of, disk_bytes, host_bytes
from smp.plan.devices import device_row
from smp.plan.layouts import LONG, differences, layouts, parts
from smp.plan.records import LayoutPlan, Moment, RankMemory, StepTime, parse_count
from smp.plan.request import more_devices, rates, read_request
from smp.plan.search import MOST_TRACES, Estimate, instructive, search
from smp.plan.tables import title_of
from smp.train.arguments import parse_args
from smp.units import GIB
from tests.job import LLAMA

LIMIT = 80 * GIB


def found_layouts(*words, nodes=8, local=8, device_type="cuda", fixed=False):
    config = parse_args([str(word) for word in (*LLAMA, *words)])
    return list(
        layouts(
            resolve_model(config.model), config.flat(), config.given, nodes=nodes, local=local,
            device_type=device_type, fixed=fixed,
        )
    )  # fmt: skip


@functools.cache
def some_layouts():
    return found_layouts(nodes=1)


def each(trace):
    """Trace the layouts one by one; what is refused is returned, as the processes that plan do."""

    def trace_all(layouts):
        found = []
        for layout in layouts:
            try:
                found.append(trace(layout))
            except UserError as error:
                found.append(error)
        return found

    return trace_all


def plan_of(layout, *, allocated, seconds, reserved=None):
    memory = RankMemory(0, Moment("forward", {"activations": allocated}), {}, reserved or allocated, 0, LIMIT)
    step = StepTime(seconds, seconds, seconds, {}, 0, 0, "")
    return LayoutPlan(str(layout.mesh), memory, step, layout.tokens, "blocks", flags=layout.flags)


def test_legal_layouts_divide_the_world_and_keep_what_was_given():
    every = found_layouts()
    assert {(each.mesh.tp.size, each.mesh.shard.size) for each in every} >= {(1, 8), (1, 64), (2, 32), (1, 1)}
    assert all(each.mesh.world_size == 64 for each in every)
    assert {each.work.micro_batch_size for each in every} == {1, 2, 4, 8, 16}
    words = ["--tensor_parallel_degree", 2, "--train_batch_size", 4, "--activation_checkpointing_mode", "full"]
    words += ["--activation_checkpointing", 1, "--activation_checkpointing_every", 1]
    given = found_layouts(*words, "--offload_activations", 0, "--sharding_strategy", "full_shard")
    assert [each.flags for each in given] == [{}] and str(given[0].mesh) == "dp_replicate 1 x dp_shard 32 x tp 2"
    recomputed = {parts(each)["recomputation"] for each in found_layouts("--activation_checkpointing", 1)}
    assert recomputed == {
        f"recompute {kept}" for kept in ("products of 1 in 2 blocks", "products", "selective", "full")
    }
    kept = {parts(each)["recomputation"] for each in found_layouts("--activation_checkpointing", 0)}
    assert kept == {"recompute none"}
    # What is moved off a CPU needs a directory.
    assert {parts(each)["offloading"] for each in found_layouts(device_type="cpu")} == {"not offloaded"}


def test_a_layout_as_it_is_given_is_one():
    (layout,) = found_layouts("--hybrid_shard_degree", 4, fixed=True)
    assert str(layout.mesh) == "dp_replicate 16 x dp_shard 4 x tp 1" and layout.flags == {}
    assert (layout.work.micro_batch_size, layout.work.accumulation) == (2, 1)


def test_a_given_sharding_degree_leaves_out_the_tensor_parallel_degrees_that_it_does_not_fit():
    found = {(each.mesh.tp.size, each.mesh.shard.size) for each in found_layouts("--hybrid_shard_degree", 4, nodes=1)}
    assert found == {(1, 4), (2, 4)}
    for words in (["--hybrid_shard_degree", 3], ["--hybrid_shard_degree", 4, "--tensor_parallel_degree", 4]):
        with pytest.raises(UserError, match="does not divide the"):
            found_layouts(*words, nodes=1)


def test_accumulation_keeps_the_global_batch():
    every = found_layouts("--global_batch_size", 256)
    assert {each.tokens for each in every} == {256 * 16}
    assert all(each.work.micro_batch_size * each.mesh.data.size * each.work.accumulation == 256 for each in every)
    assert {each.work.accumulation for each in every} >= {1, 2, 4}
    # Each data-parallel process needs a sample.
    assert {each.mesh.data.size for each in found_layouts("--global_batch_size", 32)} == {16, 32}
    assert {each.work.accumulation for each in found_layouts("--gradient_accumulation_steps", 3)} == {3}


def degrees(layouts):
    return {(each.mesh.cp.size, each.mesh.tp.size, each.mesh.shard.size) for each in layouts}


def test_long_sequences_are_split_over_the_ranks_of_a_sharding_group():
    assert {cp for cp, _, _ in degrees(some_layouts())} == {1}
    every = found_layouts("--max_context_width", LONG, nodes=1)
    assert {cp for cp, _, _ in degrees(every)} == {1, 2, 4}  # parts of no fewer than 4096 tokens
    assert all(shard % cp == 0 and cp * tp <= 8 for cp, tp, shard in degrees(every))
    four = next(each for each in every if each.mesh.cp.size == 4 and each.mesh.tp.size == 1)
    assert four.flags["context_parallel_degree"] == 4 and four.work.tokens(four.mesh) == LONG // 4
    assert four.tokens == four.work.micro_batch_size * 2 * LONG  # two sequences at a time
    assert "context_parallel_degree" not in next(each for each in every if each.mesh.cp.size == 1).flags
    assert "(cp 4 inside)" in title_of(four)
    # Not in fp32 on a GPU, whose kernels have none; nor another than what is given.
    assert {cp for cp, _, _ in degrees(found_layouts("--max_context_width", LONG, "--bf16", 0))} == {1}
    given = found_layouts("--context_parallel_degree", 2, nodes=1)
    assert {cp for cp, _, _ in degrees(given)} == {2} and "context_parallel_degree" not in given[0].flags
    sharded = found_layouts("--max_context_width", LONG, "--hybrid_shard_degree", 2, nodes=1)
    assert {(cp, shard) for cp, _, shard in degrees(sharded)} == {(1, 2), (2, 2)}
    # Each data-parallel process needs a sample.
    few = degrees(found_layouts("--max_context_width", LONG, "--global_batch_size", 2, nodes=1))
    assert few and all(8 // (cp * tp) <= 2 for cp, tp, _ in few)


def test_the_trace_decides_among_what_the_closed_form_likes():
    estimates = [
        Estimate(layout, memory=(20 + index) * GIB, seconds=layout.tokens * (1 + index / 1000))
        for index, layout in enumerate(some_layouts())
    ]
    asked = []

    def trace(layout):
        asked.append(layout)
        # The second is really too large.
        number = len(asked)
        return plan_of(layout, allocated=(90 if number == 2 else 30) * GIB, seconds=layout.tokens * (1 + number / 100))

    found = search(estimates, LIMIT, each(trace), top=3)
    assert len(asked) <= MOST_TRACES and found.plans[0][0] is asked[0]
    assert asked[1] in [each.layout for each in found.refused]
    reason = next(each for each in found.refused if each.layout is asked[1])
    assert reason.reason == "allocated 90.0 > 80.0 GiB" and reason.over == 10 * GIB
    assert found.legal == len(estimates)


def test_what_stalls_or_fails_comes_after_what_fits():
    a, b, c, *_ = {parts(layout)["recomputation"]: layout for layout in reversed(some_layouts())}.values()
    estimates = [Estimate(each, 60 * GIB, each.tokens) for each in (a, b, c)]
    plans = [
        (a, plan_of(a, allocated=70 * GIB, reserved=85 * GIB, seconds=a.tokens)),
        (b, plan_of(b, allocated=60 * GIB, seconds=2 * b.tokens)),
    ]

    def traced(layout):
        plan = next((plan for known, plan in plans if known is layout), None)
        if plan is None:
            raise UserError("the heads cannot be split so")
        return plan

    found = search(estimates, LIMIT, each(traced))
    assert [layout for layout, _ in found.plans] == [b]
    assert {each.reason for each in found.refused} == {"reserved 85.0 > 80.0 GiB", "the heads cannot be split so"}
    # Where nothing else fits, a stalling allocator is better than nothing.
    del plans[1]
    assert [layout for layout, _ in search(estimates, LIMIT, each(traced)).plans] == [a]


def test_where_nothing_fits_the_nearest_is_planned():
    estimates = [Estimate(layout, (200 + i) * GIB, 1.0) for i, layout in enumerate(some_layouts())]
    found = search(estimates, LIMIT, each(lambda layout: plan_of(layout, allocated=190 * GIB, seconds=1.0)))
    assert not found.plans and found.traced == 1
    assert found.nearest is not None and found.nearest.memory.verdict == "no"
    assert instructive(found) and all(each.over > 0 for each in instructive(found))


def test_equal_times_are_ordered_by_headroom():
    chosen = [each for each in some_layouts() if parts(each)["offloading"] == "not offloaded"][:3]
    sizes = dict(zip(map(id, chosen), (50, 40, 60), strict=True))
    estimates = [Estimate(layout, 40 * GIB, layout.tokens) for layout in chosen]
    trace = lambda layout: plan_of(layout, allocated=sizes[id(layout)] * GIB, seconds=layout.tokens)  # noqa: E731
    found = search(estimates, LIMIT, each(trace))
    assert [sizes[id(layout)] for layout, _ in found.plans] == [40, 50, 60]


def test_reasons_differ_in_one_thing_from_the_best():
    every = some_layouts()
    best = every[0]
    estimates = [Estimate(layout, (30 if layout is best else 300) * GIB, layout.tokens) for layout in every]
    found = search(estimates, LIMIT, each(lambda layout: plan_of(layout, allocated=30 * GIB, seconds=layout.tokens)))
    assert [layout for layout, _ in found.plans] == [best]
    shown = instructive(found)
    assert shown and all(len(differences(each.layout, best)) == 1 for each in shown)
    assert len({differences(each.layout, best)[0][0] for each in shown}) == len(shown)
    assert shown[0].reason == "about 300.0 > 80.0 GiB"


@pytest.mark.parametrize(
    ("text", "count"), [("4Mi", 4 * 2**20), ("1T", 10**12), ("1.5e12", 15 * 10**11), ("300B", 3 * 10**11), ("7", 7)]
)
def test_counts(text, count):
    assert parse_count("--tokens", text) == count


@pytest.mark.parametrize("text", ["", "0", "-1", "many", "1Q", "nan", "1 000"])
def test_no_counts(text):
    with pytest.raises(UserError, match="--tokens takes a number of tokens such as 4Mi"):
        parse_count("--tokens", text)


def test_utilisation_counts_no_gradients_of_frozen_weights():
    plan = plan_of(some_layouts()[0], allocated=1, seconds=1.0)

    def utilisation(*words):
        return rates(read_request([*LLAMA, *words], device_row("h100"), nodes=1, local=8), plan)["mfu"]

    full, adapters = utilisation(), utilisation("--lora_rank", "1")
    assert 4 / 6 * full < adapters < 0.9 * full


@pytest.mark.parametrize(("enough", "sentence"), [(None, "more devices would not"), (1, "^More devices, more memory")])
def test_more_devices_are_not_denied_where_the_closed_form_falls_short(enough, sentence, monkeypatch):
    monkeypatch.setattr(plan_request, "processes_that_fit", lambda *_: enough)
    request = read_request([*LLAMA], device_row("h100"), nodes=1, local=1)
    assert re.search(sentence, more_devices(request, alone=False))


def test_costs():
    cost = cost_of(10**6, step_tokens=1000, step_seconds=3.6, devices=8, price=2.0)
    assert (cost.steps, cost.hours, cost.device_hours, cost.money) == (1000, 1.0, 8.0, 16.0)
    assert cost_of(1001, step_tokens=1000, step_seconds=3.6, devices=8, price=None).steps == 2


def test_bytes_of_hosts_and_disks():
    words = ["--checkpoint_type", "async_sharded", "--num_kept_checkpoints", "3", "--save_final_model", "1"]
    config = parse_args([*LLAMA, *words])
    shape = model_shape(resolve_model(config.model))
    layout = found_layouts("--hybrid_shard_degree", 8, "--tensor_parallel_degree", 1, nodes=1)[-1]
    disk = disk_bytes(shape, layout.mesh, layout.work, config.checkpoint, local=8)
    assert disk["checkpoint"] == 12 * shape.parameters and disk["kept checkpoints"] == 4 * disk["checkpoint"]
    assert disk["final model"] == 4 * shape.parameters
    adapters = dataclasses.replace(shape, frozen_but=Trained(1000, 0, 0, 10))
    disk = disk_bytes(adapters, layout.mesh, layout.work, config.checkpoint, local=8)
    assert (disk["checkpoint"], disk["final model"]) == (12_000, 4_000)
    merging = dataclasses.replace(layout.work, settings=Settings((lora.Config(lora_rank=1, save_merged_model=True),)))
    disk = disk_bytes(adapters, layout.mesh, merging, config.checkpoint, local=8)
    assert disk["final model"] == 4 * (shape.parameters - 1000)
    host = host_bytes(shape, layout.mesh, layout.work, config.checkpoint, local=8)
    # All ranks of the host copy the whole state for the writer.
    assert 12 * shape.parameters <= host["checkpoint copy"] < 13 * shape.parameters
