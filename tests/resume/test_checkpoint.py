"""Checkpoints: the format, what counts as one, which is chosen, what is refused, and any layout from any other."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers  # noqa: F401  imported before the ranks are forked
from safetensors import safe_open
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor

from smp.checkpoint import directory as directory_module
from smp.checkpoint import manifest as manifest_module
from smp.checkpoint import writer
from smp.checkpoint.checkpointer import Checkpointer
from smp.checkpoint.directory import (
    choose_checkpoint,
    find_checkpoints,
    publish,
    quick_problem,
    refuse_foreign,
    refuse_older_branch,
    set_aside,
)
from smp.checkpoint.manifest import (
    MANIFEST_FILE,
    Chunk,
    Manifest,
    TensorEntry,
    coverage_problem,
    encode,
    problems_of_files,
    read_manifest,
)
from smp.checkpoint.reader import CheckpointReader
from smp.checkpoint.restore import Candidate, Search, restore
from smp.checkpoint.retention import prune
from smp.checkpoint.safetensors_io import Piece, read_header, strict_json, write_tensors
from smp.checkpoint.same_model import check_architecture
from smp.checkpoint.state import model_entry
from smp.checkpoint.storage import Storage
from smp.config import ActivationConfig
from smp.errors import DamagedCheckpointError, RunError, UserError
from smp.models.registry import family_of
from smp.optim.config import OptimConfig
from smp.optim.optimizers import build_optimizer, kind_of_optimizer
from smp.parallel.parallelize import parallelize
from smp.train.step import train_step
from tests import manifests
from tests.distributed import run_distributed
from tests.reference import ADAMW, Layout, build_reference, rank_batch, setup_of, tiny_config


def make(directory, step, name="m", val_loss=None, kind="sharded"):
    """A checkpoint of one tensor, written as the job writes them."""
    path = directory / f"{name}-{step}steps"
    path.mkdir(parents=True)
    value = torch.arange(6, dtype=torch.float32).reshape(2, 3) + step
    file = write_tensors(path / "a.safetensors", [Piece("w", value, (0, 0))])
    entry = TensorEntry(torch.float32, (2, 3), (Chunk("a.safetensors", (0, 0), (2, 3)),))
    manifest = Manifest(
        kind=kind, step=step, world_size=1, degrees={}, model={"name": name, "config": {}}, run={"val_loss": val_loss},
        files={"a.safetensors": file}, tensors={"w": entry},
        saved_at="2026-01-01T00:00:00+00:00",
    )  # fmt: skip
    (path / MANIFEST_FILE).write_bytes(encode(manifest))
    return path


def test_a_manifest_is_read_back_as_it_was_written(tmp_path):
    path = make(tmp_path, 7, val_loss=1.5)
    manifest = read_manifest(path)
    assert (manifest.step, manifest.kind, manifest.run) == (7, "sharded", {"val_loss": 1.5})
    assert manifest.tensors["w"].chunks == (Chunk("a.safetensors", (0, 0), (2, 3)),)
    assert problems_of_files(path, manifest, content=True) == [] and quick_problem(path) is None
    with CheckpointReader(path, manifest) as reader:
        assert reader.read("w").tolist() == [[7, 8, 9], [10, 11, 12]]
        assert reader.read("w", (1, 1), (1, 2)).tolist() == [[11, 12]]


def test_every_flipped_bit_of_a_manifest_is_noticed(tmp_path):
    path = make(tmp_path, 7)
    file = path / MANIFEST_FILE
    good = file.read_bytes()
    for position in range(len(good) * 8):
        data = bytearray(good)
        data[position // 8] ^= 1 << position % 8
        file.write_bytes(data)
        with pytest.raises(UserError, match=r"does not match its own checksum"):
            read_manifest(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m | {"schema": 2, "versions": {"smp": "9.1"}}, r"schema 2 .* reads up to 1: .* by smp 9\.1"),
        (lambda m: m | {"unknown": 1}, None),
        (lambda m: m | {"schema": "1"}, "names no schema"),
        (lambda m: m | {"kind": "odd"}, "malformed"),
        (lambda m: m | {"step": -1}, "out of range"),
        (lambda m: m | {"files": [["../a.safetensors", 1, "d"]]}, "no name of a file"),
        (lambda m: m | {"files": m["files"] * 2}, "given twice"),
        (lambda m: m | {"tensors": {"w": ["F32", [2, 4], m["tensors"]["w"][2]]}}, "w has parts that leave holes"),
        (lambda m: m | {"tensors": {"w": ["F32", [2**70, 3], []]}}, "out of range"),
        (lambda m: m | {"tensors": {"w": ["F32", [2, 3], [[5, [0, 0], [2, 3]]]]}}, "malformed"),
        (lambda m: m | {"tensors": {"w": ["object", [2, 3], []]}}, "malformed"),
        (lambda m: m | {"run": []}, "run is no object"),
    ],
)  # fmt: skip
def test_manifests_that_say_what_cannot_be(change, said, tmp_path):
    path = make(tmp_path, 7)
    manifests.write(path, change(manifests.read(path)))
    if said is None:  # what a later version of the same schema may add
        assert read_manifest(path).step == 7
        return
    with pytest.raises(UserError, match=said):
        read_manifest(path)


@pytest.mark.parametrize(
    ("chunks", "problem"),
    [
        ([((0, 0), (2, 3)), ((2, 0), (2, 3)), ((0, 3), (4, 2))], None),
        ([((0, 0), (4, 3)), ((0, 3), (2, 2)), ((2, 3), (2, 2))], None),
        ([((0, 0), (4, 4))], "holes or overlap"),
        ([((0, 0), (4, 3)), ((0, 2), (4, 2))], "overlap"),
        ([((0, 0), (4, 5)), ((0, 0), (4, 5))], "holes or overlap"),
        ([((0, 0), (4, 6))], "beyond"),
        ([((0, 0), (4, 5)), ((0, 0), (0, 5))], "empty"),
        ([((0,), (20,))], "another rank"),
        ([], "holes"),
    ],
)
def test_coverage(chunks, problem):
    found = coverage_problem(TensorEntry(torch.float32, (4, 5), tuple(Chunk("f", o, n) for o, n in chunks)))
    assert (found is None) if problem is None else problem in found


def each_element_once(entry):
    count = torch.zeros(entry.shape, dtype=torch.int64)
    for chunk in entry.chunks:
        count[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))] += 1
    return bool((count == 1).all()) and all(0 not in chunk.sizes for chunk in entry.chunks)


def test_slices_of_one_axis_are_judged_as_their_elements_are():
    cuts = [(0, 2), (2, 1), (3, 1), (0, 3), (1, 3), (0, 4), (2, 2), (2, 0)]

    def boxes(axis, count):
        for chosen in itertools.product(cuts, repeat=count):
            offsets = [(o, 0) if axis == 0 else (0, o) for o, _ in chosen]
            sizes = [(n, 4) if axis == 0 else (4, n) for _, n in chosen]
            yield tuple(Chunk("f", o, n) for o, n in zip(offsets, sizes, strict=True))

    entries = [TensorEntry(torch.float32, (4, 4), c) for a in (0, 1) for k in (1, 2, 3) for c in boxes(a, k)]
    found = [coverage_problem(entry) is None for entry in entries]
    assert found == [each_element_once(entry) for entry in entries] and 10 < sum(found) < len(found)


@pytest.mark.parametrize("rows", [(3, 2, 1), (1, 5), (6,)])
@pytest.mark.parametrize("columns", [(2, 2, 3), (7,)])
def test_a_grid_without_one_of_its_parts_or_with_one_moved_is_not_whole(rows, columns):
    spans = [[(sum(sizes[:i]), n) for i, n in enumerate(sizes)] for sizes in (rows, columns)]
    chunks = [Chunk("f", (r, c), (h, w)) for r, h in spans[0] for c, w in spans[1]]
    whole = TensorEntry(torch.float32, (sum(rows), sum(columns)), tuple(reversed(chunks)))
    assert coverage_problem(whole) is None
    for index, chunk in enumerate(chunks):
        others = chunks[:index] + chunks[index + 1 :]
        moved = [dataclasses.replace(chunk, offsets=(0, 0))] if any(chunk.offsets) else []
        for instead in ([], [chunk, chunk], moved):
            entry = dataclasses.replace(whole, chunks=(*others, *instead))
            assert coverage_problem(entry) == "has parts that leave holes or overlap"


def test_coverage_of_a_scalar_and_of_nothing():
    assert coverage_problem(TensorEntry(torch.float32, (), (Chunk("f", (), ()),))) is None
    assert coverage_problem(TensorEntry(torch.float32, (), ())) is not None
    assert coverage_problem(TensorEntry(torch.float32, (0, 4), ())) is None


def test_files_are_safetensors_of_every_dtype(tmp_path):
    tensors = {
        "f64": torch.randn(3, dtype=torch.float64), "bf16": torch.randn(5).bfloat16(),
        "i8": torch.tensor([1, -2], dtype=torch.int8),
        "bool": torch.tensor([True, False, True]), "scalar": torch.tensor(2.5), "f16": torch.randn(2, 2).half(),
    }  # fmt: skip
    written = write_tensors(tmp_path / "a.safetensors", [Piece(k, v, (0,) * v.dim()) for k, v in tensors.items()])
    assert written.size == (tmp_path / "a.safetensors").stat().st_size
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        for name, value in tensors.items():
            assert torch.equal(file.get_tensor(name), value) and file.get_tensor(name).dtype == value.dtype
    with open(tmp_path / "a.safetensors", "rb") as file:
        assert {k: v.shape for k, v in read_header(file.fileno()).items()} == {
            k: tuple(v.shape) for k, v in tensors.items()
        }


def test_json_with_a_key_twice_or_nested_too_deep():
    with pytest.raises(ValueError, match="twice"):
        strict_json(b'{"a": 1, "a": 2}')
    with pytest.raises(ValueError, match="deep"):
        strict_json(b"[" * 200_000)


def test_finds_complete_checkpoints_of_this_model_only(tmp_path):
    for step in (100, 20, 3):
        make(tmp_path, step)
    make(tmp_path, 500, name="m2")
    (tmp_path / "m-200steps").mkdir()
    (tmp_path / "m-300steps.tmp").mkdir()
    assert [c.step for c in find_checkpoints(tmp_path, "m")] == [3, 20, 100]


def test_choice(tmp_path):
    assert choose_checkpoint("latest", [tmp_path], "m") is None
    assert choose_checkpoint(None, [tmp_path], "m") is None
    make(tmp_path / "a", 10)
    newest = make(tmp_path / "b", 12)
    assert choose_checkpoint("latest", [tmp_path / "a", tmp_path / "b"], "m") == newest
    assert choose_checkpoint(str(tmp_path / "a" / "m-10steps"), [], "m").name == "m-10steps"
    with pytest.raises(UserError, match=r"already contains checkpoints up to step 12.*resume_from_checkpoint latest"):
        choose_checkpoint(None, [tmp_path / "a", tmp_path / "b"], "m")
    with pytest.raises(UserError, match=r"not a complete checkpoint.*it contains m-10steps"):
        choose_checkpoint(str(tmp_path / "a"), [], "m")


def as_link(file):
    file.rename(file.parent.parent / "x")
    file.symlink_to("../x")


DAMAGE = {
    "truncated": (lambda path: os.truncate(path / "a.safetensors", 100), "a.safetensors has 100 bytes instead of"),
    "missing": (lambda path: (path / "a.safetensors").unlink(), "a.safetensors is missing"),
    "extra": (lambda path: (path / "b.safetensors").write_bytes(b""), "b.safetensors does not belong"),
    "a link": (lambda path: as_link(path / "a.safetensors"), "regular"),
    "manifest": (lambda path: (path / MANIFEST_FILE).write_text("{"), "checksum"),
    "replayed": (lambda path: shutil.copy(path.parent / "m-1steps" / MANIFEST_FILE, path), "of step 1"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_latest_passes_over_a_damaged_one_and_a_path_does_not(damage, tmp_path, caplog):
    tmp_path /= "my run"
    older, path = make(tmp_path, 1), make(tmp_path, 2)
    assert choose_checkpoint("latest", [tmp_path], "m") == path
    action, said = DAMAGE[damage]
    action(path)
    with pytest.raises(UserError, match=said):
        choose_checkpoint(str(path), [tmp_path], "m")
    assert choose_checkpoint("latest", [tmp_path], "m") == older
    assert len(caplog.records) == 1 and said in caplog.text
    action(older) if damage != "replayed" else os.truncate(older / "a.safetensors", 3)
    with pytest.raises(UserError, match=r"none of the 2 checkpoints .* is valid: run `smp verify '.*my run'` to see"):
        choose_checkpoint("latest", [tmp_path], "m")


def test_publish_replaces_the_link_and_prune_keeps_the_newest(tmp_path):
    for step in (1, 2, 3):
        make(tmp_path, step)
    fresh = make(tmp_path / "elsewhere", 4)
    fresh.rename(tmp_path / "m-4steps.tmp")
    publish(tmp_path / "m-4steps.tmp", tmp_path / "m-4steps")
    assert os.readlink(tmp_path / "latest") == "m-4steps"
    prune(tmp_path, "m", keep=2)
    assert sorted(p.name for p in tmp_path.glob("m-*")) == ["m-3steps", "m-4steps"]


def test_prune_keeps_the_best(tmp_path):
    for step, loss in enumerate([3.0, 1.0, 2.0, None, 1.0, 4.0, 5.0], start=1):
        make(tmp_path, step, val_loss=loss)
    prune(tmp_path, "m", keep=1, keep_best=2)
    assert sorted(p.name for p in tmp_path.glob("m-*")) == ["m-2steps", "m-5steps", "m-7steps"]
    assert os.readlink(tmp_path / "best") == "m-5steps"


def test_a_kept_checkpoint_is_read_once_while_its_manifest_is_as_it_was(tmp_path, monkeypatch):
    reads = []
    monkeypatch.setattr(directory_module, "read_manifest", lambda path: reads.append(path.name) or read_manifest(path))
    for step in (1, 2, 3):
        make(tmp_path, step, val_loss=float(step))
        prune(tmp_path, "m", keep=2, keep_best=1)
    assert reads == ["m-1steps", "m-2steps", "m-3steps"]
    file = tmp_path / "m-3steps" / MANIFEST_FILE
    data, times = bytearray(file.read_bytes()), file.stat()
    data[-9] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert "does not match its own checksum" in str(quick_problem(tmp_path / "m-3steps"))


def test_prune_does_not_count_a_damaged_one_as_kept(tmp_path):
    for step in (1, 2, 3, 4):
        make(tmp_path, step)
    for step in (1, 3, 4):
        os.truncate(tmp_path / f"m-{step}steps" / "a.safetensors", 5)
    prune(tmp_path, "m", keep=1)
    assert sorted(p.name for p in tmp_path.glob("m-*")) == ["m-2steps", "m-3steps", "m-4steps"]


def test_later_checkpoints_that_a_run_goes_on_without_are_set_aside(tmp_path, caplog):
    for step in (1, 2, 3):
        make(tmp_path, step)
    make(tmp_path, 9, name="m-2")
    for _ in range(2):
        set_aside(tmp_path, "m", after=1)
        make(tmp_path, 2)
    assert "m-2steps.aside2" in caplog.text
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "m-1steps", "m-2-9steps", "m-2steps", "m-2steps.aside1", "m-2steps.aside2", "m-3steps.aside1"
    ]  # fmt: skip
    assert [c.step for c in find_checkpoints(tmp_path, "m")] == [1, 2]
    prune(tmp_path, "m", keep=1)
    assert [c.step for c in find_checkpoints(tmp_path, "m")] == [2]


def test_one_that_has_lost_its_manifest_is_told_and_set_aside(tmp_path, caplog):
    for step in (1, 2):
        make(tmp_path, step)
    (tmp_path / "m-2steps" / "manifest.json").unlink()
    assert choose_checkpoint("latest", [tmp_path], "m") == tmp_path / "m-1steps"
    assert "m-2steps is not a complete checkpoint: it has no manifest.json" in caplog.text
    set_aside(tmp_path, "m", after=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m-1steps", "m-2steps.aside1"]


def test_publishing_the_same_step_again_replaces_it_and_a_link_that_fails_does_no_harm(tmp_path, caplog):
    make(tmp_path, 4, val_loss=1.0)
    make(tmp_path / "elsewhere", 4, val_loss=2.0).rename(tmp_path / "m-4steps.tmp")
    (tmp_path / "latest" / "full").mkdir(parents=True)
    publish(tmp_path / "m-4steps.tmp", tmp_path / "m-4steps")
    assert read_manifest(tmp_path / "m-4steps").run["val_loss"] == 2.0 and quick_problem(tmp_path / "m-4steps") is None
    assert "latest could not be pointed at m-4steps: it is a directory, an old copy: remove it" in caplog.text
    assert not list(tmp_path.glob("*.*"))


def test_another_model_is_refused_with_every_difference(tmp_path):
    saved = model_entry("m", tiny_config("llama_gqa"))["config"]
    check_architecture(tmp_path, saved, tiny_config("llama_gqa"))
    saved |= {"hidden_size": 64, "num_hidden_layers": 9}
    with pytest.raises(UserError, match=r"hidden_size 64 there, 32 here; num_hidden_layers 9 there, 3 here"):
        check_architecture(tmp_path, saved, tiny_config("llama_gqa"))


def build(layout: Layout, name: str, optim: OptimConfig = ADAMW):
    model = build_reference(name, torch.float32).train()
    activation = ActivationConfig(activation_checkpointing=False)
    mesh, family = layout.mesh(), family_of(model.config)
    parallelize(model, family, mesh=mesh, parallel=layout.parallel(), activation=activation, dtype=None)
    return model, build_optimizer(model, optim, lr=1e-2)


def whole(model, optimizer) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in {"": parameter, **optimizer.state[parameter]}.items():
            tensors[f"{name} {key}"] = (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
    return tensors


def save(folder, model, optimizer, manifest) -> None:
    Checkpointer(Storage(folder), model, optimizer, name="m").write(manifest, wait=True, verify=True)


def describe(model, step, world_size, optimizer=None) -> Manifest:
    kind = {"optimizer": kind_of_optimizer(optimizer)} if optimizer else {}
    return Manifest(
        step=step, world_size=world_size, degrees={"tp": 1}, model=model_entry("m", model.config),
        run={"progress": {"step": step, "samples": 16, "tokens": 99}, **kind},
    )  # fmt: skip


def _save(folder, name, layout, *optim):
    model, optimizer = build(layout, name, *optim)
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(2):
        batch, setup = rank_batch(step, rank, size, 1), setup_of(model)
        train_step(model, optimizer, batch, setup=setup, device=torch.device("cpu"), grad_clip=1.0)
    save(folder, model, optimizer, describe(model, 2, size, optimizer))
    tensors = whole(model, optimizer)
    if rank == 0:
        torch.save(tensors, folder / "whole.pt")


def _load(folder, name, layouts, *optim):
    expected = torch.load(folder / "whole.pt")
    for layout in layouts:
        model, optimizer = build(layout, name, *optim)
        path = folder / "m-2steps"
        restore(path, read_manifest(path), model, optimizer, seed="0")
        got = whole(model, optimizer)
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[key], expected[key]) for key in got), layout
        if optim:  # the next layout reads what this one saves
            save(folder, model, optimizer, describe(model, 2, dist.get_world_size(), optimizer))


def test_any_layout_loads_bit_for_bit_at_any_other(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "FILE_BYTES", 10_000)  # each rank's part is cut into files
    run_distributed(_save, tmp_path, "llama_tied", Layout("hybrid_shard", 2), world_size=4)
    assert len(list((tmp_path / "m-2steps").glob("rank00001-*.safetensors"))) > 3
    run_distributed(_load, tmp_path, "llama_tied", [Layout("full_shard"), Layout("no_shard")], world_size=3)
    run_distributed(_load, tmp_path, "llama_tied", [Layout("full_shard")], world_size=1)


@pytest.mark.full
def test_momentum_and_moments_go_from_one_rank_to_shards_to_tensor_parallel_ranks(tmp_path):
    muon = OptimConfig(optimizer="muon")
    run_distributed(_save, tmp_path, "llama_tied", Layout("full_shard"), muon, world_size=1)
    run_distributed(_load, tmp_path, "llama_tied", [Layout("full_shard"), Layout("no_shard", tp=2)], muon, world_size=2)
    run_distributed(_load, tmp_path, "llama_tied", [Layout("full_shard")], muon, world_size=1)
    kinds = {name.split(".")[1] for name in read_manifest(tmp_path / "m-2steps").tensors if name.startswith("optim.")}
    assert kinds == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}


def test_a_branch_is_not_mixed_with_newer_checkpoints(tmp_path):
    old, new = make(tmp_path / "a", 100), make(tmp_path / "b", 300)
    refuse_older_branch(new, [tmp_path / "a", tmp_path / "b"])
    with pytest.raises(UserError, match=r"m-300steps is newer than .* step 100: move"):
        refuse_older_branch(old, [tmp_path / "a", tmp_path / "b"])
    with pytest.raises(UserError, match=r"does not continue \(m-100steps\)"):
        refuse_foreign([tmp_path / "none", tmp_path / "a"], run_dir=tmp_path)


def test_no_pickle_in_a_checkpoint_and_plain_torch_reads_it(tmp_path):
    run_distributed(_save, tmp_path, "llama_gqa", Layout("full_shard"), world_size=2)
    path = tmp_path / "m-2steps"
    assert sorted(f.name for f in path.iterdir()) == [
        "manifest.json", "rank00000-000.safetensors", "rank00001-000.safetensors"
    ]  # fmt: skip
    json.loads((path / "manifest.json").read_bytes())
    expected = torch.load(tmp_path / "whole.pt")
    target = {
        f"model.{name.removesuffix(' ')}": torch.zeros_like(value)
        for name, value in expected.items()
        if name.endswith(" ")
    }
    dcp.load(target, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    assert len(target) > 10 and all(torch.equal(target[n], expected[f"{n.removeprefix('model.')} "]) for n in target)


def _save_untrained(folder):
    layout = Layout("full_shard")
    model, optimizer = build(layout, "llama_gqa")
    save(folder, model, optimizer, describe(model, 2, 1))
    again, other = build(layout, "llama_gqa")
    path = folder / "m-2steps"
    restore(path, read_manifest(path), again, other, seed="0")
    for both in ((model, optimizer), (again, other)):
        batch, setup = rank_batch(0, 0, 1, 1), setup_of(both[0])
        train_step(*both, batch, setup=setup, device=torch.device("cpu"), grad_clip=1.0)
    assert all(map(torch.equal, whole(model, optimizer).values(), whole(again, other).values()))
    assert all(float(state["step"]) == 1 for state in other.state.values()) and len(other.state) > 10


def test_a_run_whose_updates_were_all_skipped_can_be_resumed(tmp_path):
    run_distributed(_save_untrained, tmp_path, world_size=1)


def _save_again(folder):
    model, optimizer = build(Layout("full_shard"), "llama_tied")
    batch, setup = rank_batch(0, 0, 1, 1), setup_of(model)
    train_step(model, optimizer, batch, setup=setup, device=torch.device("cpu"), grad_clip=1.0)
    save(folder / "a", model, optimizer, describe(model, 2, dist.get_world_size()))
    again = build(Layout("full_shard"), "llama_tied")
    path = folder / "a" / "m-2steps"
    restore(path, read_manifest(path), *again, seed="0")
    save(folder / "b", *again, describe(model, 2, dist.get_world_size()))
    assert read_manifest(path).files == read_manifest(folder / "b" / "m-2steps").files


def test_a_resumed_run_writes_the_files_of_one_that_was_not_stopped(tmp_path):
    run_distributed(_save_again, tmp_path, world_size=2)


def _save_what_is_too_large(folder):
    model, optimizer = build(Layout("full_shard"), "llama_gqa")
    for limit in ("MAX_VALUES", "MAX_MANIFEST"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(manifest_module, limit, 100)
            patch.setattr(manifest_module, "VALUES_PER_FILE", 0)
            with pytest.raises(RunError, match=r"was not published, as .* more than 100 "):
                save(folder, model, optimizer, describe(model, 2, 1))
        assert list(folder.iterdir()) == []


def test_a_manifest_that_could_not_be_read_is_not_published(tmp_path):
    run_distributed(_save_what_is_too_large, tmp_path, world_size=1)


def test_a_manifest_may_list_more_where_there_are_more_files(tmp_path, monkeypatch):
    path = make(tmp_path, 7)
    monkeypatch.setattr(manifest_module, "MAX_VALUES", 20)
    monkeypatch.setattr(manifest_module, "VALUES_PER_FILE", 0)
    with pytest.raises(UserError, match="lists more than 20 things"):
        read_manifest(path)
    monkeypatch.setattr(manifest_module, "VALUES_PER_FILE", 10)
    assert read_manifest(path).step == 7


def _first_valid(folder, kind):
    paths = [make(folder, step, kind=kind) for step in (3, 2)]
    flipped = bytearray((paths[0] / "a.safetensors").read_bytes())
    flipped[-1] ^= 1
    (paths[0] / "a.safetensors").write_bytes(flipped)

    def newest(damaged):
        left = [path for path in paths if path not in damaged]
        return Candidate(left[0], read_manifest(left[0])) if left else Candidate(None, None)

    assert Search(newest, latest=True, content=True).first().checkpoint == paths[1]
    assert Search(newest, latest=True, content=False).first().checkpoint == paths[0]
    with pytest.raises(DamagedCheckpointError, match=r"m-3steps is damaged: .*a.safetensors is not as it was written"):
        Search(newest, latest=False, content=True).first()
    (paths[1] / "a.safetensors").unlink()
    assert Search(newest, latest=True, content=False).first().checkpoint == paths[0]
    assert Search(newest, latest=True, content=True).first() == Candidate(None, None)


@pytest.mark.parametrize("kind", ["sharded", "local"])
def test_damaged_candidates_are_passed_over_only_where_the_latest_is_wanted(kind, tmp_path):
    run_distributed(_first_valid, tmp_path, kind, world_size=1)


def _load_wrong(folder, name, sentence):
    layout = Layout("full_shard")
    model, optimizer = build(layout, name)
    with pytest.raises(UserError, match=sentence):
        path = folder / "m-2steps"
        restore(path, read_manifest(path), model, optimizer, seed="0")


def test_tensors_that_do_not_fit_are_refused(tmp_path):
    run_distributed(_save, tmp_path, "llama_tied", Layout("full_shard"), world_size=1)
    run_distributed(_load_wrong, tmp_path, "llama_gqa", "model.lm_head.weight is missing", world_size=1)
    said = "does not fit the model: .* and .* more; resume with the model"
    run_distributed(_load_wrong, tmp_path, "gpt_neox", said, world_size=1)
