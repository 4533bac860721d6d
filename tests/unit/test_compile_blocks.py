"""Compiled blocks: one graph for all, what is kept, and what happens when a block cannot be compiled."""

from __future__ import annotations

import collections
import copy
import functools

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.partitioners import min_cut_rematerialization_partition

from smp.config import ActivationConfig, Settings
from smp.errors import RunError, UserError
from smp.local_shards import local_tensor
from smp.memory.profile import profile_memory
from smp.mesh import lay_out
from smp.models.registry import family_of
from smp.parallel import activation_checkpoint, compile_blocks, lora, parallelize
from smp.parallel.technique import Setup
from tests.distributed import run_distributed
from tests.reference import INDUCTOR, Layout, build_reference, global_batch, rank_batch, relative, setup_of, tiny_config
from tests.unit.test_activation_checkpoint import products
from tests.unit.test_activation_offload import blocks_of

COMPILE = torch.compile


class Graphs:
    """A backend that runs the graphs of forward and backward as they are, partitioned as by inductor, and counts."""

    def __init__(self):
        self.forward: list[collections.Counter] = []
        self.backward: list[collections.Counter] = []
        self.backend = aot_autograd(
            fw_compiler=functools.partial(self.compile, self.forward),
            bw_compiler=functools.partial(self.compile, self.backward),
            partition_fn=min_cut_rematerialization_partition,
        )

    @staticmethod
    def compile(where, module, inputs):
        counts: collections.Counter = collections.Counter()
        for node in (node for node in module.graph.nodes if node.op == "call_function"):
            name = str(node.target)
            if "rng_state" in name:  # an operation that may draw random numbers, with them
                name = " ".join(map(str, node.args[:2]))
            counts["products"] += name in ("aten.mm.default", "aten.addmm.default")
            counts["attention"] += "attention" in name and "backward" not in name
            counts["saved"] += "mm" in name and any(user.op == "output" for user in node.users)
        where.append(counts)
        return make_boxed_func(module.forward)


@pytest.fixture
def graphs(monkeypatch):
    """Compiles with :class:`Graphs`, anew."""
    torch._dynamo.reset()
    counters.clear()
    found = Graphs()
    monkeypatch.setattr(torch, "compile", functools.partial(COMPILE, backend=found.backend))
    yield found
    torch._dynamo.reset()


def prepared(model, mode="none", *, every=1, chosen=False, tp=1):
    """Checkpoint and compile the blocks of a model, in place."""
    activation = ActivationConfig(
        activation_checkpointing=mode != "none",
        activation_checkpointing_mode="selective" if mode == "selective" else "full",
        activation_checkpointing_every=every,
        compile="auto" if chosen else True,
    )
    settings = Settings((activation,))
    settings = settings.changed(compile=True) if chosen else settings
    setup = Setup(family_of(model.config), lay_out(1, 1, tp), settings)
    model.config.use_cache = False
    for technique in parallelize.TECHNIQUES:
        if technique in (activation_checkpoint, compile_blocks):
            technique.apply(model, setup)
    return model


def step(model, step=0):
    ids, labels = global_batch(step)
    model.zero_grad()
    loss = model(input_ids=ids, labels=labels, use_cache=False).loss
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


def same(found, expected, tolerance=1e-6):
    loss, gradients = found
    assert float((loss - expected[0]).abs()) <= tolerance
    assert all(a is b is None or relative(a - b, b) <= tolerance for a, b in zip(gradients, expected[1], strict=True))


# Products and attentions that backward computes again, of a block. The last products of one are not needed.
AGAIN = {
    ("llama_gqa", "none"): (0, 0),
    ("llama_gqa", "full"): (6, 1),
    ("llama_gqa", "selective"): (3, 0),
    ("gpt_neox", "none"): (0, 0),
    ("gpt_neox", "full"): (2, 1),
    ("gpt_neox", "selective"): (0, 0),
}
PRODUCTS = {"llama_gqa": 7, "gpt_neox": 4}


@pytest.mark.parametrize(
    ("name", "mode"),
    [pytest.param(*key, marks=() if key == ("llama_gqa", "selective") else pytest.mark.full) for key in AGAIN],
)
def test_one_graph_and_what_it_computes_again(name, mode, graphs):
    reference = build_reference(name, torch.float64)
    model = prepared(copy.deepcopy(reference), mode)
    same(step(model), step(reference))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    (forward,), (backward,) = graphs.forward, graphs.backward
    again, attentions = AGAIN[name, mode]
    assert forward["products"] == PRODUCTS[name] and forward["attention"] == 1
    assert backward["products"] == 2 * PRODUCTS[name] + again and backward["attention"] == attentions
    # Nothing more than uncompiled.
    eager = copy.deepcopy(reference)
    if mode != "none":
        activation_checkpoint.apply_activation_checkpointing(blocks_of(eager), mode=mode)
    assert 3 * again <= products(eager) - products(reference)


def test_adapters_are_compiled_once_for_all_blocks_and_save_what_a_block_without_them_does(graphs):
    reference = lora.adapt(build_reference("llama_gqa", torch.float64), 4)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    model = prepared(copy.deepcopy(reference), "selective")
    same(step(model), step(reference))
    # The first block's input comes from a frozen embedding, and has no gradient; the other blocks are two.
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]
    plain = prepared(build_reference("llama_gqa", torch.float64), "selective")
    step(plain)
    assert [found["saved"] for found in graphs.forward] == [3, 3, 3]


def run_kinds_of_batches(model):
    """Run batches as training and validations have them: with a mask of documents or without."""
    for training, documents in ((True, False), (True, True), (False, False)):
        ids, positions = torch.randint(0, 64, (2, 16)), torch.arange(16).expand(2, 16)
        with torch.set_grad_enabled(training):
            positions = positions % 5 if documents else positions
            model.train(training)(input_ids=ids, position_ids=positions, use_cache=False)


@pytest.mark.full
@pytest.mark.parametrize("allowed", [64, 1])
@torch._dynamo.config.patch(recompile_limit=1)  # less than there are kinds
def test_kinds_of_batches_do_not_end_a_run(allowed, graphs, monkeypatch):
    monkeypatch.setattr(compile_blocks, "GRAPHS", allowed)
    model = prepared(build_reference("llama_gqa", torch.float64))
    if allowed == 1:
        with pytest.raises(UserError, match="recompile limit exceeded"):
            run_kinds_of_batches(model)
    else:
        run_kinds_of_batches(model)
        assert counters["stats"]["unique_graphs"] == 3


@pytest.mark.full
@INDUCTOR
@pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch 2.11 mixes fp64 and fp32 in attention's backward")
@pytest.mark.parametrize("mode", [pytest.param("full", marks=pytest.mark.slow), "selective"])
def test_inductor(mode):
    torch._dynamo.reset()
    counters.clear()
    reference = build_reference("gpt_neox", torch.float64)
    model = prepared(copy.deepcopy(reference), mode)
    for each in range(2):
        same(step(model, each), step(reference, each))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.full
def test_blocks_of_any_number_are_compiled_once(graphs):
    config = tiny_config("llama_gqa")
    config.num_hidden_layers = 9  # more than torch compiles anew
    model = prepared(type(build_reference("llama_gqa", torch.float32))(config), "selective")
    for each in range(2):
        step(model, each)
    assert len(graphs.forward) == len(graphs.backward) == 1
    ids, _ = global_batch(0)
    with torch.no_grad():
        model.eval()(input_ids=ids)
    model.train()
    step(model)
    assert len(graphs.forward) == 2  # another one without gradients
    for rows, length in ((4, 12), (6, 12), (6, 8), (7, 9), (9, 5)):
        model(input_ids=ids[:rows, :length]).logits.sum().backward()
    assert len(graphs.forward) == 4  # with one for any number of rows, and one for any length too
    assert not counters["graph_break"]


@pytest.mark.full
def test_every_second_block(graphs):
    reference = build_reference("llama_gqa", torch.float64)
    same(step(prepared(copy.deepcopy(reference), "full", every=2)), step(reference))
    assert len(graphs.forward) == 2


def _sharded(mode, tp, sequence):
    from smp.config import LossConfig
    from smp.optim.config import OptimConfig
    from smp.optim.optimizers import build_optimizer
    from smp.parallel.parallelize import parallelize
    from smp.train.step import train_step

    torch._dynamo.reset()
    counters.clear()
    losses = []
    for compiled in (True, False):
        # GPT-NeoX's split layers are the ones of one layer with a bias.
        model = build_reference("gpt_neox" if tp > 1 else "llama_gqa", torch.float64)
        layout = Layout("full_shard", tp=tp, sequence=sequence)
        mesh = layout.mesh()
        activation = ActivationConfig(activation_checkpointing_mode=mode, compile=compiled)
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(torch, "compile", functools.partial(COMPILE, backend="aot_eager"))
            parallelize(
                model, family_of(model.config), mesh=mesh, parallel=layout.parallel(), dtype=None,
                activation=activation, loss=LossConfig(),
            )  # fmt: skip
        optimizer = build_optimizer(model, OptimConfig(), lr=1e-3)
        losses.append([])
        for each in range(3):
            batch = rank_batch(each, mesh.data_rank, mesh.data_size, 2)
            setup = setup_of(model, mesh)
            result = train_step(model, optimizer, batch, setup=setup, device=torch.device("cpu"), grad_clip=0.5)
            losses[-1] += [result.loss(), float(result.grad_norm)]
        graphs = [counters["stats"]["unique_graphs"]]
        with torch.no_grad():
            logits = model.eval()(input_ids=global_batch(0)[0][:4]).logits
        losses[-1].append(float(local_tensor(logits).sum()))
        graphs.append(counters["stats"]["unique_graphs"])
        assert graphs == ([1, 2] if compiled else [2, 2]) and not counters["graph_break"]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("mode", [pytest.param("full", marks=pytest.mark.slow), "selective"])
@pytest.mark.parametrize(
    ("tp", "sequence"),
    [pytest.param(1, False, marks=pytest.mark.slow), (2, True), pytest.param(2, False, marks=pytest.mark.slow)],
)
def test_sharded_and_split_blocks_are_compiled_once(mode, tp, sequence):
    run_distributed(_sharded, mode, tp, sequence, world_size=2)


def breaking(name="llama_gqa"):
    """A model whose blocks read a number."""
    model = build_reference(name, torch.float64)
    for block in blocks_of(model):
        forward = block.mlp.forward

        def reads(x, forward=forward):
            return forward(x) * (1.0 if x.sum().item() > -1e9 else 0.0)

        block.mlp.forward = reads
    return model


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("smp")]


@pytest.mark.parametrize("mode", [pytest.param("none", marks=pytest.mark.full), "selective"])
def test_a_block_that_breaks_the_graph(mode, graphs, caplog):
    expected = step(breaking())
    where = r"compile LlamaDecoderLayer, at .*test_compile_blocks.py:\d+ `return forward\(x\) \* .*`: .*"
    with pytest.raises(UserError, match=where + "leave --compile out or give --compile 0") as refused:
        step(prepared(breaking(), mode))
    assert "\n" not in str(refused.value)
    for tp in (1, 2):  # all ranks meet it
        caplog.clear()
        same(step(prepared(breaking(), mode, chosen=True, tp=tp)), expected, 0)
        (warning,) = warnings(caplog)
        assert warning.startswith("Blocks run uncompiled: torch.compile cannot compile LlamaDecoderLayer, at ")
    assert not graphs.forward


@pytest.mark.parametrize("graph", ["forward", "backward"])
@pytest.mark.full
def test_a_compiler_that_fails(graph, graphs, caplog, monkeypatch):

    def fail(module, inputs):
        raise OSError("no space left on the device")

    works = functools.partial(graphs.compile, [])
    backend = aot_autograd(**{"fw_compiler": works, f"{graph[0]}w_compiler": fail})
    monkeypatch.setattr(torch, "compile", functools.partial(COMPILE, backend=backend))
    reference = build_reference("gpt_neox", torch.float64)
    for options in ({}, {"chosen": True, "tp": 2}):  # a split block's collectives must be those of the other ranks
        with pytest.raises(RunError, match=r"cannot compile GPTNeoXLayer.*give --compile 0"):
            step(prepared(copy.deepcopy(reference), **options))
    same(step(prepared(copy.deepcopy(reference), chosen=True)), step(reference), 0)
    (warning,) = warnings(caplog)
    assert warning.startswith("Blocks run uncompiled: ") and "no space left" in warning


@pytest.mark.full
def test_under_a_dispatch_mode_blocks_run_uncompiled_and_are_compiled_later(graphs):
    model = prepared(build_reference("gpt_neox", torch.float32), "full")
    with profile_memory(model):
        step(model)
    assert not graphs.forward
    step(model)
    assert len(graphs.forward) == 1
