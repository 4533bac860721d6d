"""Values under tensor parallelism: initial, pretrained, saved and exported ones are one process's, bit for bit."""

from __future__ import annotations

import copy
import ctypes
import itertools
import logging
import pathlib
import re
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from smp import delayed_init
from smp.checkpoint import hf_export
from smp.checkpoint.checkpointer import Checkpointer
from smp.checkpoint.hf_export import export_hf
from smp.checkpoint.manifest import Manifest, read_manifest
from smp.checkpoint.restore import restore
from smp.checkpoint.state import model_entry
from smp.checkpoint.storage import Storage
from smp.config import ActivationConfig, Settings
from smp.delayed_init import build_on_meta, initialize_, materialize_
from smp.models.meta_model import init_rules
from smp.models.model_config import ResolvedModel
from smp.models.registry import build_model, family_of
from smp.optim.config import OptimConfig
from smp.optim.optimizers import build_optimizer
from smp.parallel.parallelize import prepare_model
from smp.train.step import train_step
from tests import reference
from tests.distributed import run_distributed
from tests.reference import Layout, rank_batch, setup_of
from tests.resume.test_checkpoint import whole

CPU = torch.device("cpu")
NAMES = ["llama_tied", "gpt_neox", "odd"]
FOUR = [  # of four processes
    Layout("full_shard", tp=2), Layout("full_shard", tp=4), Layout("no_shard", tp=2), Layout("full_shard"),
]  # fmt: skip
# Every layout with the model whose sizes do not divide; the others, whose parameters are other ones, at the first.
LAID_OUT = {name: FOUR if name == "odd" else FOUR[:1] for name in NAMES}


def tiny_config(name: str):
    """Those of the parity tests; ``odd``, where neither vocabulary nor MLP divides; ``wide``, of about 100 MB."""
    if name == "wide":
        return transformers.LlamaConfig(
            vocab_size=16_000, hidden_size=512, intermediate_size=1376, num_hidden_layers=3, num_attention_heads=8,
            num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
        )  # fmt: skip
    config = copy.deepcopy(reference.tiny_config("llama_gqa" if name == "odd" else name))
    config.num_hidden_layers = 2
    if name == "odd":
        config.vocab_size, config.intermediate_size, config.pad_token_id = 97, 50, 96
    return config


def changed_model(name: str):
    """A plain model; no value is the initial one."""
    torch.manual_seed(3)
    model = build_model(tiny_config(name), attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.train()


def values(model) -> dict[str, torch.Tensor]:
    """Whole parameters and buffers by name."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in found.items()}


def assert_values(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: object) -> None:
    assert got.keys() == expected.keys(), what
    for name, value in got.items():
        assert torch.equal(value, expected[name]), (what, name)


def prepared(name: str, layout: Layout, *, weights: pathlib.Path | None = None, delayed: bool = True):
    """The model as the job builds it."""
    config = tiny_config(name)
    resolved = ResolvedModel(name, family_of(config), config, 16, weights, None, None, "sdpa", delayed)
    return prepare_model(
        resolved, mesh=layout.mesh(), dtype=torch.float32, device=CPU, seed=3, load_weights=weights is not None,
        settings=Settings((layout.parallel(), ActivationConfig(activation_checkpointing=False))),
    )  # fmt: skip


def one_process(name: str) -> dict[str, torch.Tensor]:
    """Initial values without any process group."""
    config = tiny_config(name)
    model = build_on_meta(lambda: build_model(config, attn_implementation="sdpa"))
    materialize_(model, CPU)
    initialize_(model, init_rules(config, seed=3), seed=3)
    return values(model)


def _check_initial(expected):
    for name in expected:
        for layout in LAID_OUT[name]:
            assert_values(values(prepared(name, layout)), expected[name], (name, layout))
    assert_values(values(prepared("odd", FOUR[0], delayed=False)), expected["odd"], "not delayed")


@pytest.mark.full
def test_initial_values_are_those_of_one_process(monkeypatch):
    # Blocks much smaller than a parameter, so that parts begin and end inside them.
    monkeypatch.setattr(delayed_init, "BLOCK", 500)
    expected = {name: one_process(name) for name in NAMES}
    assert expected["odd"]["model.embed_tokens.weight"][96].eq(0).all()  # of the padding token
    run_distributed(_check_initial, expected, world_size=4)


class CountReads:
    """Stands for safetensors' ``get_slice``; counts bytes, and the process's memory while it holds a slice."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        import safetensors

        self.total = self.largest = self.peak = 0
        real = safetensors.safe_open
        monkeypatch.setattr(safetensors, "safe_open", lambda *a, **k: _Counted(real(*a, **k), self))

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        self.total += tensor.nbytes
        self.largest = max(self.largest, tensor.nbytes)
        tensor.sum()  # brings in its pages of the file
        self.peak = max(self.peak, resident())
        return tensor


class _Counted:
    def __init__(self, opened, counter):
        self.opened, self.counter = opened, counter

    def __enter__(self):
        self.opened.__enter__()
        return self

    def __exit__(self, *exception):
        return self.opened.__exit__(*exception)

    def __getattr__(self, name):
        return getattr(self.opened, name)

    def get_slice(self, key):
        return _CountedSlice(self.opened.get_slice(key), self.counter)


class _CountedSlice(_Counted):
    def __getitem__(self, index):
        return self.counter.read(self.opened[index])


def resident() -> int:
    """The process's memory in bytes, pages of mapped files included."""
    return int(re.search(r"VmRSS:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())[1]) * 1024


def _check_pretrained(folder, names):
    for name in names:
        expected = values(changed_model(name))
        for layout in LAID_OUT[name]:
            with pytest.MonkeyPatch.context() as patches:
                reads = CountReads(patches)
                model = prepared(name, layout, weights=folder / name)
            held = sum(p.to_local().nbytes for p in model.parameters())
            assert reads.total == held, (name, layout)  # a slice for each part, and nothing read twice
            assert_values(values(model), expected, (name, layout))


@pytest.mark.full
def test_each_rank_reads_its_slices_of_pretrained_weights(tmp_path):
    for name in NAMES:
        changed_model(name).save_pretrained(tmp_path / name, max_shard_size="30KB")
    run_distributed(_check_pretrained, tmp_path, NAMES, world_size=4)


def _check_memory(folder, layout):
    gap = 4 * 2**20  # what an allocator rounds up, a file's header, code that runs for the first time
    allocated: list[int] = []
    transform = sys.modules["smp.parallel.parallelize"]
    real = transform.materialize_

    def materialize(model, device):
        ctypes.CDLL(None).malloc_trim(0)  # freed memory of before would be used again and not show
        allocated.append(resident())
        real(model, device)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(transform, "materialize_", materialize)
        reads = CountReads(patches)
        model = prepared("wide", layout, weights=folder / "wide")
    held = sum(p.to_local().nbytes for p in model.parameters())
    used = max(reads.peak, resident()) - allocated[0]
    print(f"tp {layout.tp}: part {held:,}, peak {used:,}, largest slice {reads.largest:,}")
    assert reads.total == held and 0.9 * held <= used <= held + reads.largest + gap


@pytest.mark.parametrize(
    "layout",
    [Layout("full_shard", tp=2), pytest.param(Layout("full_shard", tp=4), marks=pytest.mark.slow)],
    ids=["tp2", "tp4"],
)
def test_host_memory_is_a_rank_s_part_and_one_tensor(layout, tmp_path):
    changed_model("wide").save_pretrained(tmp_path / "wide")
    run_distributed(_check_memory, tmp_path, layout, world_size=4)


MATRIX = {"dp4": Layout("full_shard"), "tp2-dp2": Layout("full_shard", tp=2), "tp4": Layout("full_shard", tp=4)}


def build(name: str, layout: Layout):
    model = prepared(name, layout)
    return model, build_optimizer(model, OptimConfig(), lr=1e-2)


def step(model, optimizer, layout: Layout, number: int) -> float:
    """The loss of one training step; the same global batch at any layout."""
    mesh = layout.mesh()
    batch = rank_batch(number, mesh.data_rank, mesh.data_size, 1)
    return train_step(model, optimizer, batch, setup=setup_of(model, mesh), device=CPU, grad_clip=1.0).loss()


def _save_matrix(folder, name):
    for key, layout in MATRIX.items():
        model, optimizer = build(name, layout)
        for number in range(2):
            step(model, optimizer, layout, number)
        manifest = Manifest(
            step=2, world_size=dist.get_world_size(), degrees={"tp": layout.tp},
            model=model_entry("m", model.config), run={"progress": {"step": 2, "samples": 32, "tokens": 99}},
        )  # fmt: skip
        Checkpointer(Storage(folder / key), model, optimizer, name="m").write(manifest, wait=True, verify=True)
        saved = whole(model, optimizer)
        saved["next loss"] = torch.tensor(step(model, optimizer, layout, 2), dtype=torch.float64)
        if dist.get_rank() == 0:
            torch.save(saved, folder / f"{key}.pt")
    dist.barrier()


def _load(folder, name, pairs):
    for key, layout in pairs:
        expected = torch.load(folder / f"{key}.pt")
        loss = float(expected.pop("next loss"))
        model, optimizer = build(name, layout)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7)  # so that what is not loaded shows
        path = folder / key / "m-2steps"
        restore(path, read_manifest(path), model, optimizer, seed="0")
        assert_values(whole(model, optimizer), expected, (key, layout))
        assert step(model, optimizer, layout, 2) == pytest.approx(loss, rel=1e-5), (key, layout)


def _save_and_load(folder, name, pairs):
    _save_matrix(folder, name)
    _load(folder, name, pairs)


@pytest.mark.parametrize(
    ("name", "every"), [("gpt_neox", False), *(pytest.param(name, True, marks=pytest.mark.slow) for name in NAMES)]
)
@pytest.mark.full
def test_checkpoints_of_any_layout_load_at_any_other(name, every, tmp_path):
    dp4, both, tp4 = MATRIX.values()
    next_ones = [("dp4", both), ("tp2-dp2", tp4), ("tp4", dp4)]
    run_distributed(
        _save_and_load, tmp_path, name, [*itertools.product(MATRIX, MATRIX.values())] if every else next_ones,
        world_size=4,
    )  # fmt: skip
    of_two = [Layout("full_shard", tp=2), *([dp4] if every else [])]
    run_distributed(_load, tmp_path, name, [*itertools.product(MATRIX, of_two)], world_size=2)
    run_distributed(_load, tmp_path, name, [(key, dp4) for key in MATRIX], world_size=1)


class KeepAlive:
    """Counts the whole parameters that a rank holds at once while it exports."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.seen: list[weakref.ref] = []
        self.most = 0
        real = hf_export.full_tensor

        def gathered(parameter):
            whole = real(parameter)
            self.seen = [r for r in self.seen if r() is not None]
            if whole.data_ptr() != parameter.to_local().data_ptr():  # one that is whole on every rank is not copied
                self.seen.append(weakref.ref(whole))
            self.most = max(self.most, len(self.seen))
            return whole

        monkeypatch.setattr(hf_export, "full_tensor", gathered)


def _export(folder, names, layouts):
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torch.distributed.tensor").addHandler(handler)
    for name in names:
        for key, layout in layouts.items():
            model = prepared(name, layout, weights=folder / name)
            with pytest.MonkeyPatch.context() as patches:
                held = KeepAlive(patches)
                export_hf(model, folder / key / name, hf_config=model.config, max_shard_bytes=20_000)
            # One just gathered while the one before goes, and one that gloo's thread has not let go of; rank 0 keeps a
            # file's worth besides.
            assert 0 < held.most <= 3 or dist.get_rank() == 0, (name, key, held.most)
    assert not said
    if dist.get_world_size() > 1:
        values(prepared("llama_tied", MATRIX["tp2-dp2"]))  # what torch would have said
        assert "redistributing" in said[0]


@pytest.mark.full
def test_exports_are_those_of_one_process(tmp_path):
    names = NAMES
    for name in names:
        changed_model(name).save_pretrained(tmp_path / name)
    run_distributed(_export, tmp_path, names, {"one": Layout("full_shard")}, world_size=1)
    layouts = {"tp2-dp2": MATRIX["tp2-dp2"], "tp4": MATRIX["tp4"], "replicas": Layout("no_shard", tp=2)}
    run_distributed(_export, tmp_path, names, layouts, world_size=4)
    for name in names:
        files = {p.name: p.read_bytes() for p in sorted((tmp_path / "one" / name).iterdir())}
        assert len(files) > 4
        for key in layouts:
            assert {p.name: p.read_bytes() for p in sorted((tmp_path / key / name).iterdir())} == files, (name, key)
        exported = {k: t for p in (tmp_path / "tp4" / name).glob("*.safetensors") for k, t in load_file(p).items()}
        theirs = load_file(tmp_path / name / "model.safetensors")
        assert_values(exported, theirs, name)
