import dataclasses
import importlib.util
import math
import pathlib
import sys

import pytest

from smp.memory.shape import ModelShape
from smp.plan.closed_time import ClosedLayout, closed_step
from smp.plan.devices import DEVICES, MEASURED, DeviceRow, Efficiency, Tables
from smp.plan.exchange import exchange_seconds, ring_seconds, sent_bytes
from smp.plan.kernels import UNMASKED, attention, moved_bytes, product, sheet_seconds
from smp.plan.measured import Measured, interpolated
from smp.plan.records import Exchange, Operation, Segment, TensorShape
from smp.plan.time import step_time

ALL = Efficiency(1, 1, 1, 1, 1, 1)
# 1 TFLOP/s, and bytes that cost nothing: a product's seconds are its FLOPs / 1e12.
GPU = DeviceRow(
    "toy", 1.0, 1e9, 10.0, links=10.0, network=1.0, host_link=1.0, capability=(9, 0), efficiency=ALL,
    host_us={"none": 0.0, "full": 0.0, "selective": 1e6},
)  # fmt: skip


def tensor(*shape, dtype="bfloat16"):
    return TensorShape(shape, dtype)


def operation(name, *inputs, outputs=()):
    return Operation(f"aten.{name}.default", inputs, tuple(outputs))


SECOND = operation("mm", tensor(1000, 5000), tensor(5000, 100_000), outputs=[tensor(1000, 100_000)])
assert product(SECOND).flops == 1e12


def gather(seconds, *, asynchronous=True, kind="all_gather", axis="shard", ranks=2):
    nbytes = round(seconds * 10e9 * ranks / (ranks - 1))
    return Exchange(kind, nbytes, ranks, axis, asynchronous)


def seconds(segments, row=GPU, **kwargs):
    return step_time(segments, row, **{"local": 8, "groups": {"shard": (2, 2)}, **kwargs})


def block(phase, *events, index=0):
    return Segment(phase, index, 0, events)


def test_one_block_and_the_range():
    found = seconds([(block("forward", SECOND), 3), (Segment("update", None, 0, (SECOND,)), 1)])
    assert found.parts == {"compute": pytest.approx(3), "optimizer": pytest.approx(1)}
    assert (found.seconds, found.low, found.high) == (pytest.approx(4), pytest.approx(3), pytest.approx(5))
    faster = dataclasses.replace(GPU, factor=2.0, low=0.9, high=1.05)
    found = seconds([(block("forward", SECOND), 4)], faster)
    assert (found.seconds, found.low, found.high) == (pytest.approx(2), pytest.approx(1.8), pytest.approx(2.1))


def test_a_gather_is_hidden_by_the_segment_that_issues_it():
    hidden = seconds([(block("forward", SECOND, gather(0.5)), 4)])
    assert hidden.parts == {"compute": pytest.approx(4)}
    exposed = seconds([(block("forward", SECOND, gather(1.5)), 4)])
    assert exposed.parts["exposed gathers"] == pytest.approx(4 * 0.5, rel=1e-3)
    # Of the embedding, before anything is computed.
    first = seconds([(Segment("begin", None, 0, (gather(0.5),)), 1), (block("forward", SECOND), 1)])
    assert first.parts["exposed gathers"] == pytest.approx(0.5, rel=1e-3)


def test_a_reduction_is_hidden_by_the_next_block_and_the_last_one_is_not():
    scatter = gather(0.75, kind="reduce_scatter")
    found = seconds([(block("backward", SECOND, scatter), 4)])
    assert found.parts["exposed gathers"] == pytest.approx(0.75, rel=1e-3)
    # Reduction of the block before and gather of the next one share the links.
    found = seconds([(block("backward", SECOND, gather(0.75), scatter), 4), (Segment("update", None, 0, ()), 1)])
    assert found.parts["exposed gathers"] == pytest.approx(3 * 0.5 + 0.75, rel=1e-3)


def test_what_waits_is_named():
    events = (
        SECOND,
        gather(0.25, asynchronous=False, axis="tp", kind="all_reduce"),
        gather(0.125, asynchronous=False, axis="world", kind="all_reduce"),
        gather(0.0625, asynchronous=False),
    )
    found = seconds([(block("forward", *events), 2)])
    assert found.parts["tensor-parallel exchanges"] == pytest.approx(1.0, rel=1e-3)  # an all-reduce is two passes
    assert found.parts["other exchanges"] == pytest.approx(0.5, rel=1e-3)
    assert found.parts["exposed gathers"] == pytest.approx(0.125, rel=1e-2)
    assert found.seconds == pytest.approx(sum(found.parts.values()))


def test_infinite_links_and_a_slow_host():
    row = dataclasses.replace(GPU, links=math.inf, network=math.inf)
    segments = [(block("forward", SECOND, gather(100.0)), 4)]
    assert seconds(segments, row).seconds == pytest.approx(4, rel=1e-3)
    slow = seconds([(block("forward", SECOND, SECOND), 2)], recompute="selective")
    assert slow.parts == {"compute": pytest.approx(4)}  # two operations a segment: the host needs as long
    slow = seconds([(block("forward", SECOND, operation("add", tensor(1))), 2)], recompute="selective")
    assert slow.parts["host"] == pytest.approx(2) and slow.seconds == pytest.approx(4)


def test_offloading_is_hidden_as_far_as_it_goes():
    segments = [(block("forward", SECOND), 4)]
    assert seconds(segments, offloaded=10**9).seconds == pytest.approx(4)
    assert seconds(segments, offloaded=3 * 10**9).parts["offloading"] == pytest.approx(2)


def test_a_ring_over_whole_hosts_uses_all_cards():
    # 8 ranks on each of two hosts: eight shares of the network; one rank on each: one.
    assert ring_seconds(16e9, 16, 8, GPU) == pytest.approx(15 / 8, rel=1e-3)
    assert ring_seconds(16e9, 2, 1, GPU) == pytest.approx(8, rel=1e-3)
    assert ring_seconds(16e9, 32, 16, GPU) == pytest.approx(15.5 / 10, rel=1e-3)  # no faster than the links
    assert ring_seconds(16e9, 1, 1, GPU) == 0
    exchange = Exchange("all_gather", 1600, 16, "shard", True)
    assert sent_bytes(exchange, 8) == (1312, 188) and sent_bytes(exchange, 16) == (1500, 0)
    assert sent_bytes(exchange._replace(kind="all_to_all"), 8) == (700, 800)
    found = seconds([(block("forward", exchange), 2)], groups={"shard": (16, 8)})
    assert (found.inside, found.between) == (2624, 376)


def test_shifts_are_hidden_by_the_attention_that_follows():
    keys = TensorShape((1, 1, 10**5, 50), "bfloat16")
    attend = Operation(f"aten._scaled_dot_product_flash_attention.default{UNMASKED}", (keys,) * 3, ())
    assert attention(attend).flops == 2e12  # two seconds

    def shift(seconds):
        return Exchange("send", round(seconds * 10e9), 2, "cp", False)

    def waited(*events):
        return seconds([(block("forward", *events), 1)], groups={"cp": (2, 2)}).parts.get("context-parallel exchanges")

    assert waited(shift(1.5), attend) is None
    assert waited(shift(2.5), attend) == pytest.approx(0.5, rel=1e-3)
    assert waited(attend, shift(0.5), SECOND) == pytest.approx(0.5, rel=1e-3)  # other operations hide nothing
    assert waited(gather(0.25, asynchronous=False, axis="cp")) == pytest.approx(0.25, rel=1e-3)


def test_a_shift_between_hosts_has_one_card():
    shift = Exchange("send", 10**9, 16, "cp", False)
    assert exchange_seconds(shift, 16, GPU) == pytest.approx(0.1, rel=1e-3)
    assert exchange_seconds(shift, 8, GPU) == pytest.approx(1.0, rel=1e-3)
    assert sent_bytes(shift, 16) == (10**9, 0) and sent_bytes(shift, 8) == (875_000_000, 125_000_000)


def test_attention_of_packed_sequences():
    bounds, heads = tensor(3, dtype="int32"), [tensor(20, 8, 64), *[tensor(60, 2, 64)] * 2]
    # Two sequences of 10 queries, which see 30 keys, of which the last 10 are masked by half.
    causal = operation("_flash_attention_forward", *heads, bounds, bounds)
    assert attention(causal).scores == 8 * 2 * (10 * 30 - 10 * 10 / 2)
    whole = causal._replace(name=causal.name + UNMASKED)
    assert attention(whole).scores == 8 * 2 * 10 * 30
    backward = operation("_flash_attention_backward", heads[0], *heads, heads[0], bounds, bounds)
    assert attention(backward).flops == 2.5 * attention(causal).flops
    documents = Operation("torch_attn._varlen_attn.default", (*[tensor(20, 8, 64)] * 3, bounds), ())
    assert attention(documents).scores == 8 * 20 * 10 / 2


def test_the_closed_form_splits_sequences():
    shape = ModelShape(8 * 10**9, 0, 0, 32, 4096, 14336, 32, 128256, gated_mlp=True, key_value_heads=8)
    row = DEVICES["h100"]
    one = closed_step(shape, ClosedLayout(32768, 1, shard=8), row)

    def split(cp, exchange="all_gather", **layout):
        return closed_step(shape, ClosedLayout(32768, 1, shard=8, cp=cp, exchange=exchange, **layout), row)

    assert one.parts["context-parallel exchanges"] == 0
    for exchange in ("all_gather", "p2p", "all_to_all"):
        four = split(4, exchange)
        # A quarter, and the results of attention packed and merged.
        assert 1 < four.parts["compute"] / (one.parts["compute"] / 4) < 1.2
        assert 0 <= four.parts["context-parallel exchanges"] < 0.1 * four.seconds
        again = split(4, exchange, recompute="full").parts["context-parallel exchanges"]
        assert again >= four.parts["context-parallel exchanges"]
    waited = {exchange: [split(cp, exchange).parts["context-parallel exchanges"] for cp in (2, 8)]
              for exchange in ("all_gather", "all_to_all")}  # fmt: skip
    # As what they move: 2.5 times an all_gather's at 2 ranks, 0.63 of it at 8.
    assert waited["all_to_all"][0] > waited["all_gather"][0] and waited["all_to_all"][1] < waited["all_gather"][1]


def test_operations():
    linear = operation("addmm", tensor(7), tensor(3, 5), tensor(5, 7), outputs=[tensor(3, 7)])
    assert product(linear).flops == 2 * 3 * 5 * 7
    batched = operation("bmm", tensor(4, 3, 5), tensor(4, 5, 7), outputs=[tensor(4, 3, 7)])
    assert product(batched).flops == 4 * 2 * 3 * 5 * 7 and product(operation("add", tensor(3), tensor(3))) is None
    written = Operation("aten.mm.out", (tensor(3, 5), tensor(5, 7), tensor(3, 7)), (tensor(3, 7),))
    assert product(written).flops == 2 * 3 * 5 * 7
    heads = [tensor(2, 8, 128, 64)] * 3
    forward = attention(operation("_scaled_dot_product_flash_attention", *heads))
    backward = attention(operation("_scaled_dot_product_flash_attention_backward", heads[0], *heads))
    assert forward.scores == backward.scores == 2 * 8 * 128 * 128 / 2 and backward.flops == 2.5 * forward.flops
    grouped = attention(
        operation("_scaled_dot_product_flash_attention", tensor(1, 8, 16, 64), *[tensor(1, 2, 64, 64)] * 2)
    )
    assert grouped.scores == 8 * 16 * 64  # fewer queries than keys: the mask is not taken for a causal one
    assert moved_bytes(operation("add", tensor(10), tensor(10), outputs=[tensor(10)])) == 60
    table = operation("embedding", tensor(10**6, 8), tensor(5), outputs=[tensor(5, 8)])
    assert moved_bytes(table) == 2 * 80  # the rows that are looked up, not the table
    placed = operation("scatter_", tensor(10, 100), tensor(10, 1), tensor(10, 1), outputs=[tensor(10, 100)])
    assert moved_bytes(placed) == 2 * (20 + 20)
    assert moved_bytes(operation("copy_", tensor(10), tensor(10), outputs=[tensor(10)])) == 40
    assert moved_bytes(operation("chunk_cat", tensor(6), tensor(4), tensor(10))) == 40
    assert moved_bytes(operation("split_with_sizes_copy", tensor(10), tensor(6), tensor(4))) == 40
    gathered = operation("all_gather_copy_in", tensor(10), tensor(640), outputs=[tensor(10), tensor(640)])
    assert moved_bytes(gathered) == 40  # its own part, whatever the number of ranks
    update = operation("_fused_adamw_", *[tensor(10, dtype="float32")] * 4)
    assert moved_bytes(update) == 40 * 7 and moved_bytes(operation("_foreach_mul_", tensor(10))) == 40
    row = dataclasses.replace(GPU, bandwidth=1e-3)
    assert sheet_seconds(operation("add", tensor(10), outputs=[tensor(10)]), row) == pytest.approx(40e-9)
    assert sheet_seconds(operation("mm", tensor(1, 10), tensor(10, 1)), row) == pytest.approx(80e-9)  # bytes bound it


def test_fp32_has_a_sixteenth_of_the_bf16_peak():
    """Also of a GPU whose products were measured in bf16 alone."""
    single = operation("mm", *[tensor(100, 100, dtype="float32")] * 2)
    half = operation("mm", *[tensor(100, 100)] * 2)
    assert sheet_seconds(single, GPU) == pytest.approx(16 * sheet_seconds(half, GPU))
    heads = {dtype: operation("_flash_attention", *[tensor(1, 1, 100, 64, dtype=dtype)] * 3) for dtype in TYPES}
    line = ("bfloat16", "nt", 100, 100, 100, 2.0)
    found = Measured(TABLES._replace(products=[line], attention=[("bfloat16", 5000, 64, 1.0, 2.0)]), "nccl")
    assert (found.seconds(half, "nt"), found.seconds(single, "nt")) == (2.0, 32.0)
    assert [found.seconds(heads[dtype], "nt") for dtype in TYPES] == [1.0, 16.0]


TYPES = ("bfloat16", "float32")
TABLES = Tables(
    products=[("float32", "nt", 100, 100, 100, 2.0), ("float32", "nt", 1000, 1000, 1000, 200.0),
        ("float32", "tn", 7, 9, 11, 1.0)],
    elementwise=[("add", 100, 1.0), ("add", 10_000, 10.0), ("silu", 100, 5.0)],
    attention=[("float32", 1000, 64, 1.0, 2.0), ("float32", 4000, 64, 4.0, 8.0)], adamw=[(100, 1.0), (1000, 10.0)],
    exchanges=[("smddp", "all_gather", 1000, 1.0), ("smddp", "all_gather", 4000, 2.0),
        ("gloo", "all_gather", 1000, 9.0), ("gloo", "all_gather of activations", 1000, 11.0)],
    host={"none": 1e6, "full": 2e6, "selective": 3e6}, probe={},
)  # fmt: skip
CPU = DeviceRow("cpu", source=MEASURED, on="a test", tables={2: TABLES})


def test_interpolation():
    points = [(100.0, 1.0), (10_000.0, 10.0)]
    assert interpolated(points, 1000.0) == pytest.approx(math.sqrt(10))
    assert [interpolated(points, at) for at in (100.0, 10_000.0, 20_000.0, 50.0, 0.0)] == [1, 10, 20, 0.5, 0]
    found = Measured(TABLES, "smddp")
    single = {"dtype": "float32"}
    exact = operation("mm", tensor(1000, 1000, **single), tensor(1000, 1000, **single))
    assert found.seconds(exact, "nt") == pytest.approx(200)
    wide = operation("mm", tensor(300, 300, **single), tensor(300, 300, **single))
    assert 2 * 300**3 / 1e7 < found.seconds(wide, "nt") < 2 * 300**3 / 1e6
    assert found.seconds(operation("silu", tensor(25), outputs=[tensor(25)]), "nt") == pytest.approx(5)
    other = operation("gelu", tensor(25), outputs=[tensor(25)])
    assert found.seconds(other, "nt") == pytest.approx(1)  # as an addition
    assert found.seconds(operation("silu_", tensor(25), outputs=[tensor(25)]), "nt") == pytest.approx(5)
    scaled = Measured(TABLES._replace(elementwise=[("mul", 100, 1.0), ("mul broadcast", 100, 3.0)]), "smddp")
    nothing = [tensor(0)]
    assert scaled.seconds(operation("mul", tensor(25), tensor(25), outputs=nothing), "nt") == pytest.approx(1)
    assert scaled.seconds(operation("mul", tensor(9, 5), tensor(5), outputs=nothing), "nt") == pytest.approx(3)
    assert scaled.seconds(operation("mul", tensor(48), tensor(), outputs=[tensor()]), "nt") == pytest.approx(1)
    heads = [tensor(1, 1, 100, 64, **single)] * 3
    assert found.seconds(operation("_scaled_dot_product_flash_attention_for_cpu", *heads), "nt") == pytest.approx(5)
    assert found.seconds(operation("_fused_adamw_", *[tensor(500, **single)] * 4), "nt") == pytest.approx(5, rel=1e-2)
    assert found.exchange(Exchange("all_gather", 2000, 2, "shard", False)) == pytest.approx(math.sqrt(2))
    gloo = Measured(TABLES, "gloo")
    assert gloo.exchange(Exchange("broadcast", 1000, 2, "shard", False)) == 9
    gathers = {axis: gloo.exchange(Exchange("all_gather", 1000, 2, axis, False)) for axis in ("shard", "tp", "cp")}
    assert gathers == {"shard": 9, "tp": 11, "cp": 11}


def test_what_a_product_is_added_to_is_copied_on_a_cpu():
    x = [tensor(100, 100, dtype="float32")] * 2
    bias, results = tensor(100, dtype="float32"), [tensor(100, 100, dtype="float32")]
    tables = TABLES._replace(elementwise=[("copy_", 80_000, 0.5), ("copy_", 160_000, 9.0)])
    added = operation("addmm", bias, *x, outputs=results)
    assert Measured(tables, "smddp").seconds(added, "nt") == pytest.approx(2.5)
    assert Measured(tables, "nccl", on_gpu=True).seconds(added, "nt") == pytest.approx(2.0)
    assert Measured(tables, "smddp").seconds(operation("mm", *x, outputs=results), "nt") == pytest.approx(2.0)
    in_place = operation("addmm_", *results, *x, outputs=results)
    assert Measured(tables, "smddp").seconds(in_place, "nt") == pytest.approx(2.0)


def test_on_a_cpu_everything_takes_its_turn():
    add = operation("add", tensor(25), outputs=[tensor(25)])
    exchange = Exchange("all_gather", 1000, 2, "shard", True)
    found = seconds([(block("forward", add, exchange), 2)], CPU, local=2)
    assert found.parts == {"compute": 2.0, "exposed gathers": 2.0, "host": 2.0}
    assert found.low == pytest.approx(0.9 * 6) and "measured" in found.source
    assert seconds([(block("forward", add), 1)], CPU, local=1, recompute="full").parts["host"] == 2.0


def test_a_weights_gradient_is_known_by_the_sum_over_tokens():
    single = {"dtype": "float32"}
    forward = operation("mm", tensor(9, 7, **single), tensor(7, 11, **single))
    gradient = operation("mm", tensor(7, 9, **single), tensor(9, 11, **single))
    found = seconds([(block("forward", forward), 1), (block("backward", gradient), 1)], CPU, local=2)
    products = Measured(TABLES, "smddp")
    assert found.parts["compute"] == pytest.approx(products.seconds(forward, "nt") + 1.0)


SHAPE = ModelShape(
    parameters=8_030_000_000, largest_unit=0, block=0, layers=32, hidden=4096, intermediate=14336, heads=32,
    vocabulary=128256, gated_mlp=True, key_value_heads=8,
)  # fmt: skip


def test_the_closed_form_orders_layouts():
    layout = ClosedLayout(8192, 1, shard=8)
    base = closed_step(SHAPE, layout, DEVICES["h100"])
    assert base.seconds == pytest.approx(sum(base.parts.values())) and 0.5 < base.seconds < 1.5
    changed = {
        name: closed_step(SHAPE, dataclasses.replace(layout, **change), DEVICES["h100"]).seconds
        for name, change in {
            "full": {"recompute": "full"}, "selective": {"recompute": "selective"}, "double": {"batch": 2},
            "fused": {"fused": True}, "tp": {"tp": 8, "shard": 1}, "accumulated": {"accumulation": 2},
        }.items()
    }  # fmt: skip
    assert base.seconds < changed["selective"] < changed["full"] < changed["double"] <= changed["accumulated"]
    assert changed["fused"] < base.seconds and changed["tp"] < base.seconds  # an eighth of the tokens' work each
    slow = dataclasses.replace(DEVICES["h100"], network=6.25)
    wide = dataclasses.replace(layout, shard=64)
    assert (
        closed_step(SHAPE, wide, slow).parts["exposed gathers"]
        > closed_step(SHAPE, layout, slow).parts["exposed gathers"]
    )


# Median absolute errors of tokens per second and rank correlations; they may not get worse.
PUBLISHED = {
    "h100": (0.092, 0.084, 0.97), "a100_80gb": (0.045, 0.024, 0.97), "a100_40gb": (0.039, 0.032, 0.99),
}  # fmt: skip


@pytest.fixture
def benchmark(monkeypatch):
    path = pathlib.Path(__file__).parents[2] / "benchmarks" / "plan.py"
    monkeypatch.syspath_prepend(str(path.parent))
    spec = importlib.util.spec_from_file_location("benchmarks_plan", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_published_runs_do_not_get_worse(benchmark):
    errors = benchmark.published_errors()
    assert {hardware for _, hardware in errors} == set(PUBLISHED)
    for (_, hardware), found in errors.items():
        blind, held_out, ranking = PUBLISHED[hardware]
        assert found.runs >= 61 and found.blind <= blind and found.held_out <= held_out, (hardware, found)
        assert found.ranking >= ranking, (hardware, found)
        assert DEVICES[hardware].factor == pytest.approx(found.factor, abs=0.01)


def test_more_processes_than_were_measured_share_the_cores():
    table = Tables([["float32", "nt", 512, 512, 512, 1e-3]], [], [], [], [], {"none": 100.0}, {})
    row = DeviceRow("cpu", bandwidth=1.0, source=MEASURED, tables={1: table, 2: table})
    single = tensor(512, 512, dtype="float32")
    step = [(block("forward", operation("mm", single, single, outputs=[single])), 1)]
    two, four = (seconds(step, row, local=local) for local in (2, 4))
    assert two.parts == {"compute": pytest.approx(1e-3), "host": pytest.approx(1e-4)}
    assert four.parts == {name: 2 * value for name, value in two.parts.items()}
    assert seconds(step, row, local=1).seconds == two.seconds


def test_processes_wait_for_the_slowest_where_they_meet():
    table = Tables([["float32", "nt", 512, 512, 512, 1e-3]], [], [], [], [], {"none": 0.0}, {})
    row = DeviceRow("cpu", bandwidth=1.0, source=MEASURED, tables={1: table, 2: table._replace(waiting=0.05)})
    single = tensor(512, 512, dtype="float32")
    step = [(block("forward", operation("mm", single, single, outputs=[single])), 2)]
    assert seconds(step, row, local=1).parts == {"compute": pytest.approx(2e-3)}
    assert seconds(step, row, local=2).parts == {
        "compute": pytest.approx(2e-3), "waiting for other ranks": pytest.approx(1e-4),
    }  # fmt: skip
