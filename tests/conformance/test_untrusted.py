"""Files that somebody has made to do harm: refused by name, at once, in bounded memory, and nothing in them is run."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import pathlib
import pickle
import re
import resource
import shutil
import signal
import struct
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

import smp.cli
from smp.checkpoint.manifest import problems_of_files, read_manifest
from smp.data.hf import open_mapped, saved_files
from smp.data.jsonl import LINES, MAX_LINE
from smp.data.storage import list_files
from smp.data.text import TextTokenizer, read_text
from smp.data.token_cache import TokenFile, cached, recorded
from smp.errors import DamagedCheckpointError, UserError
from smp.json_input import read_json
from smp.models.model_config import ModelConfig, resolve_model
from smp.models.weight_files import find_weights, weight_map
from tests import manifests
from tests.clock import HANG_SECONDS
from tests.job import LLAMA, run_job

FLAGS = ["--use_synthetic_data", 1, "--max_steps", 1]
COMMANDS = ("verify", "inspect", "export", "diff")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A checkpoint of one process; never changed."""
    root = tmp_path_factory.mktemp("untrusted") / "run"
    run_job(*LLAMA, *FLAGS, "--output_dir", root).succeeded()
    return root / "checkpoints" / "llama_v2-1steps"


@pytest.fixture
def checkpoint(good, tmp_path):
    return manifests.copy(good, tmp_path / "copy")


@pytest.fixture
def canary(tmp_path):
    """(bytes of a pickle that makes a file when it is read, the file)."""
    file = tmp_path / "canary"

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {file}",)

    return pickle.dumps(Evil()), file


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Every refusal comes, and nobody is asked on the terminal."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the user was asked"))
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))
    signal.alarm(int(HANG_SECONDS))
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def all_commands_refuse(capsys, tmp_path):
    """Give a checkpoint to every sub-command; each must refuse it in a sentence that names ``what``."""

    def run(path: pathlib.Path, what: str, commands=COMMANDS) -> None:
        for command in commands:
            extra = {"export": [str(tmp_path / "out")], "diff": [str(path)]}.get(command, [])
            status = smp.cli.main([command, str(path), *extra])
            out, err = capsys.readouterr()
            assert status in (1, 2) and re.search(what, out + err), (command, status, out, err)
            assert len(err.splitlines()) <= 1 and not (tmp_path / "out").exists(), err

    return run


def sparse(path: pathlib.Path, size: int, start: bytes = b"") -> pathlib.Path:
    """A file of any size that takes no room."""
    path.write_bytes(start)
    os.truncate(path, size)
    return path


def in_child(action: Callable[[], object], *, headroom: int) -> None:
    """Run ``action`` in a process that may allocate ``headroom`` more bytes than it has now."""

    def run() -> None:
        used = int(re.search(r"VmData:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())[1]) << 10
        resource.setrlimit(resource.RLIMIT_DATA, (used + headroom, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        try:
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join(HANG_SECONDS)
    status = child.exitcode
    child.kill()
    assert status == 0, "see the traceback above" if status else "it has not ended"


# ------------------------------------------------------------------------------------------------------------- manifest


def put(*keys: Any, value: Any) -> Callable[[Any], None]:
    """A change: ``content[key]...[last key] = value``."""

    def mutate(content: Any) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return mutate


NORM = "model.model.norm.weight"
MUTATIONS = {
    "absolute": put("files", 0, 0, value="/etc/passwd"),
    "below": put("files", 0, 0, value="a/b"),
    "dots": put("files", 0, 0, value=".."),
    "empty name": put("files", 0, 0, value=""),
    "nul": put("files", 0, 0, value="a\0b"),
    "number as name": put("files", 0, 0, value=7),
    "itself": put("files", 0, 0, value="manifest.json"),
    "file of two": put("files", 0, value=["x", 1]),
    "negative size": put("files", 0, 1, value=-1),
    "huge size": put("files", 0, 1, value=2**80),
    "no files": put("files", value=None),
    "files object": put("files", value={"a": 1}),
    "negative shape": put("tensors", NORM, 1, value=[-32]),
    "huge shape": put("tensors", NORM, 1, value=[2**63]),
    "overflowing shape": put("tensors", NORM, value=["F32", [2**62, 2**62], [[0, [0, 0], [2**62, 2**62]]]]),
    "larger than its file": put("tensors", NORM, value=["F32", [2**40], [[0, [0], [2**40]]]]),
    "float shape": put("tensors", NORM, 1, value=[32.0]),
    "bool shape": put("tensors", NORM, value=["F32", [True], [[0, [0], [True]]]]),
    "shape of a million axes": put("tensors", NORM, value=["F32", [1] * 10**6, [[0, [0] * 10**6, [1] * 10**6]]]),
    "shape text": put("tensors", NORM, 1, value="32"),
    "overlap": lambda content: content["tensors"][NORM][2].append(content["tensors"][NORM][2][0]),
    "beyond": put("tensors", NORM, 2, 0, 1, value=[1]),
    "file that is not listed": put("tensors", NORM, 2, 0, 0, value=99),
    "last file from behind": put("tensors", NORM, 2, 0, 0, value=-1),
    "unknown dtype": put("tensors", NORM, 0, value="F8_E4M3"),
    "dtype list": put("tensors", NORM, 0, value=["F32"]),
    "tensors list": put("tensors", value=[]),
    "tensor text": put("tensors", NORM, value="F32"),
    "text step": put("step", value="1"),
    "no processes": put("world_size", value=None),
    "model list": put("model", value=[]),
    "run text": put("run", value="x"),
    "missing": lambda content: content.pop("degrees"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_manifest_that_lies_is_refused(checkpoint, name):
    manifests.change(checkpoint, MUTATIONS[name])
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json") as caught:
        read_manifest(checkpoint)
    assert len(str(caught.value)) < 2000 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        pytest.param(b'{"schema":1,"schema":1}', "a key appears twice", marks=pytest.mark.full),
        (b'{"schema":1,"x":' + b"[" * 200_000, "nested too deep"),
        (b'{"schema":1,"x":' + b'{"a":' * 200_000, "nested too deep"),
        (b"[]", "cannot be read"),
        (b"nonsense", "cannot be read"),
        (b"{}", "cannot be read|names no schema"),
        (b'{"schema":' + b"9" * 10_000 + b"}", "cannot be read"),
        (b'{"schema":true}', "names no schema"),
        (b'{"schema":9}', "has schema 9 and this version of smp reads up to"),
        (b'{"schema":9,"versions":["x"]}', "has schema 9 and this version of smp reads up to"),
        (b'{"schema":9,"versions":{"smp":{"a":1}}}', "has schema 9 and this version of smp reads up to"),
    ],
)
@pytest.mark.smoke
def test_a_manifest_that_is_no_manifest_is_refused(checkpoint, body, what, all_commands_refuse):
    (checkpoint / "manifest.json").write_bytes(manifests.seal(body))
    with pytest.raises(UserError, match=what):
        read_manifest(checkpoint)
    all_commands_refuse(checkpoint, what)


ODD: list[Any] = [None, -1, 1.5, True, "x\x1b[2J\n" * 1000, [], [{}], {}, {"a": {"b": [1]}}, {"": None}, 10**400]
PLACES = [
    ("saved_at",), ("versions",), ("versions", "smp"), ("degrees",), ("degrees", "tp"), ("model",), ("model", "name"),
    ("model", "config"), ("model", "config", "model_type"), ("run",), ("run", "progress"), ("run", "progress", "step"),
    ("run", "config"), ("run", "config", "lr"), ("run", "val_loss"), ("run", "data"), ("run", "more"),
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_whatever_a_manifest_says_is_shown_or_refused(good, checkpoint, place, capsys):
    for value in ODD:
        content = manifests.read(good)
        put(*place, value=value)(content)
        manifests.write(checkpoint, content)
        for words in (["inspect"], ["inspect", "--json"], ["inspect", str(checkpoint.parent)], ["diff", str(good)]):
            status = smp.cli.main([*words, *([] if str(checkpoint.parent) in words else [str(checkpoint)])])
            out, err = capsys.readouterr()
            assert status in (0, 1, 2) and "\x1b" not in out + err, (place, value)
            assert max(map(len, out.splitlines()), default=0) < 2000 or "--json" in words


def test_a_manifest_of_any_size_is_refused_in_bounded_memory(checkpoint):
    sparse(checkpoint / "manifest.json", 10 << 30, b'{"checksum":"')

    def refuse() -> None:
        with pytest.raises(DamagedCheckpointError, match="no file of at most"):
            read_manifest(checkpoint)

    in_child(refuse, headroom=200 << 20)


def test_ten_million_files_are_refused_in_bounded_memory(checkpoint):
    content = manifests.read(checkpoint)
    body = json.dumps({**content, "files": []}).encode()
    many = b",".join([b'["a",1,""]'] * 10**7)
    body = body.replace(b'"files": []', b'"files": [' + many + b"]")
    (checkpoint / "manifest.json").write_bytes(manifests.seal(body))
    del body, many

    def refuse() -> None:
        with pytest.raises(DamagedCheckpointError, match=r"manifest\.json"):
            read_manifest(checkpoint)

    in_child(refuse, headroom=1 << 30)


def test_links_and_pipes_are_refused(checkpoint, tmp_path, all_commands_refuse):
    file = manifests.tensor_file(checkpoint)
    elsewhere = tmp_path / file.name
    file.rename(elsewhere)
    for make in (lambda: file.symlink_to(elsewhere), lambda: os.mkfifo(file), file.mkdir):
        make()
        assert problems_of_files(checkpoint, read_manifest(checkpoint), content=True) == [
            f"{file.name} is no regular file"
        ]
        all_commands_refuse(checkpoint, f"{file.name} is no regular file", ("verify", "export", "diff"))
        file.rmdir() if file.is_dir() else file.unlink()
    elsewhere.rename(file)
    manifest = checkpoint / "manifest.json"
    manifest.rename(tmp_path / "manifest.json")
    manifest.symlink_to(tmp_path / "manifest.json")
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json cannot be opened"):
        read_manifest(checkpoint)
    manifest.unlink()
    os.mkfifo(manifest)
    in_child(lambda: refused_by(lambda: read_manifest(checkpoint), r"manifest\.json"), headroom=200 << 20)


def refused_by(action: Callable[[], object], what: str) -> None:
    with pytest.raises(UserError, match=what):
        action()


RESUME = {
    "no progress": put("run", "progress", value=None),
    "progress of text": put("run", "progress", value={"step": "1", "samples": 1, "tokens": 1}),
    "negative progress": put("run", "progress", "samples", value=-5),
    "unknown progress": put("run", "progress", "more", value=1),
    "no batch": lambda content: content["run"].pop("global_batch_size"),
    "batch of text": put("run", "global_batch_size", value="many"),
    "settings list": put("run", "config", value=[]),
    "no config": lambda content: content["model"].pop("config"),
    "config list": put("model", "config", value=[]),
}


def test_an_export_copies_no_file_that_a_manifest_names(checkpoint, tmp_path, capsys):
    """A run's chat template is in its checkpoint; a tokenizer's directory has its files, or a cache's links to them."""
    secret, out = tmp_path / "credentials", tmp_path / "out"
    secret.write_text('{"secret": 1}')
    named = tmp_path / "tokenizer"
    named.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (named / name).write_text("{}")

    def export(*words: str) -> tuple[int, str]:
        shutil.rmtree(out, ignore_errors=True)
        status = smp.cli.main(["export", str(checkpoint), str(out), *words])
        assert not any("secret" in file.read_text(errors="replace") for file in out.rglob("*.*"))
        return status, "".join(capsys.readouterr())

    def set_to(name: str, value: Any) -> None:
        manifests.change(checkpoint, put("run", "config", name, value=str(value)))

    set_to("chat_template", secret)
    status, said = export()
    assert status == 0 and "No chat template was copied: the checkpoint has no text of the run's: --chat_temp" in said
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    for words, text in (((), "{{ 'run' }}"), (("--chat_template", str(tmp_path / "t.jinja")), "{{ messages }}")):
        manifests.change(checkpoint, put("model", "chat_template", value="{{ 'run' }}"))
        assert export(*words)[0] == 0 and (out / "chat_template.jinja").read_text() == text
    set_to("tokenizer_name_or_dir", named)
    assert export()[0] == 0 and (out / "tokenizer.json").is_file()
    repository = tmp_path / "hub" / "models--a--b"
    snapshot = repository / "snapshots" / "c0ffee"
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (repository / "blobs" / "1234").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/1234")
    set_to("tokenizer_name_or_dir", snapshot)
    assert export()[0] == 0 and (out / "tokenizer.json").read_text() == "{}"
    for folder, file in ((named, "tokenizer.json"), (snapshot, "generation_config.json")):
        (folder / file).unlink(missing_ok=True)
        (folder / file).symlink_to(secret)
        set_to("tokenizer_name_or_dir", folder)
        status, said = export()
        assert status == 2 and f"{folder / file} is a link to {secret}, outside of" in said and not out.exists(), said
    set_to("hf_pretrained_model_name_or_dir", snapshot)
    status, said = export("--tokenizer", str(tmp_path / "hub" / ".." / "tokenizer"))
    assert status == 2 and "generation_config.json is a link to" in said and not out.exists(), said


@pytest.mark.parametrize("name", RESUME)
def test_a_run_does_not_start_from_a_manifest_that_lies(checkpoint, name, tmp_path):
    manifests.change(checkpoint, RESUME[name])
    words = [*LLAMA, "--use_synthetic_data", 1, "--max_steps", 2, "--output_dir", tmp_path / "new"]
    outcome = run_job(*words, "--resume_from_checkpoint", checkpoint)
    assert outcome.statuses == [2] and "llama_v2-1steps" in outcome.output, outcome.output
    assert "Traceback" not in outcome.output, outcome.output


# -------------------------------------------------------------------------------------------------------------- pickles


@pytest.mark.parametrize("name", ["optimizer.pt", "state.bin", ".metadata", "rng.pkl", "__0_0.distcp"])
def test_a_pickle_beside_a_checkpoint_is_refused_unread(checkpoint, name, canary, all_commands_refuse):
    (checkpoint / name).write_bytes(canary[0])
    all_commands_refuse(checkpoint, f"{name} does not belong to it", ("verify", "export", "diff"))
    assert not canary[1].exists()


def test_a_pickle_in_place_of_tensors_is_refused_unread(checkpoint, canary, all_commands_refuse):
    file = manifests.tensor_file(checkpoint)
    file.write_bytes(canary[0])
    manifests.relist(checkpoint, file.name)
    all_commands_refuse(checkpoint, re.escape(file.name), ("verify", "export"))
    assert not canary[1].exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "model.pkl"])
def test_pickled_weights_are_refused_unread(tmp_path, name, canary):
    (tmp_path / name).write_bytes(canary[0])
    for given in (tmp_path, tmp_path / name):
        with pytest.raises(UserError, match=rf"{name} is a pickle"):
            find_weights(given)
    (tmp_path / "model.safetensors").write_bytes(canary[0])
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read as safetensors"):
        weight_map(tmp_path)
    assert not canary[1].exists()


def test_a_pickle_in_arrow_data_is_not_run(tmp_path, canary):
    import pyarrow as pa

    metadata = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": canary[0]}
    schema = pa.schema([pa.field("input_ids", pa.list_(pa.int64()), metadata=metadata)])
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.record_batch([pa.array([[1, 2]], pa.list_(pa.int64()))], schema=schema))
    files = list_files(str(tmp_path / "a.arrow"), extensions=(".arrow",))
    try:
        open_mapped(files, 2, 10, str(tmp_path / "cache"))
    except UserError as error:
        assert "a.arrow" in str(error)
    assert not canary[1].exists()


# ---------------------------------------------------------------------------------------------------------- safetensors


def tensor_bytes(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def header_of(**entries: Any) -> bytes:
    found = {name: {"dtype": d, "shape": s, "data_offsets": o} for name, (d, s, o) in entries.items()}
    return json.dumps(found).encode()


EIGHT = bytes(8)
BAD_TENSORS = {
    "empty": b"",
    "short": b"\x10\0\0",
    "header longer than the file": tensor_bytes(b"{}", length=1000),
    "header of 2^63": tensor_bytes(b"{}", length=2**63),
    "header of 2^64-1": tensor_bytes(b"{}", length=2**64 - 1),
    "header of 1 GB": tensor_bytes(b"{}", length=10**9),
    "no JSON": tensor_bytes(b"not json"),
    "a list": tensor_bytes(b"[1, 2]"),
    "not UTF-8": tensor_bytes(b'{"\xff": 1}'),
    "nested": tensor_bytes(b'{"a":' * 50_000),
    "overlap": tensor_bytes(header_of(a=("F32", [2], [0, 8]), b=("F32", [1], [4, 8])), EIGHT),
    "hole": tensor_bytes(header_of(a=("F32", [1], [0, 4]), b=("F32", [1], [8, 12])), bytes(12)),
    "truncated": tensor_bytes(header_of(a=("F32", [2], [0, 8])), bytes(7)),
    "trailing": tensor_bytes(header_of(a=("F32", [2], [0, 8])), bytes(9)),
    "unknown dtype": tensor_bytes(header_of(a=("EVIL", [2], [0, 8])), EIGHT),
    "negative offset": tensor_bytes(header_of(a=("F32", [2], [-8, 0])), EIGHT),
    "negative shape": tensor_bytes(header_of(a=("F32", [-2], [0, 8])), EIGHT),
    "overflowing shape": tensor_bytes(header_of(a=("F32", [2**62, 2**62], [0, 8])), EIGHT),
    "shape of more": tensor_bytes(header_of(a=("F32", [3], [0, 8])), EIGHT),
    "offsets reversed": tensor_bytes(header_of(a=("F32", [2], [8, 0])), EIGHT),
    "offsets beyond": tensor_bytes(header_of(a=("F32", [4], [0, 16])), EIGHT),
    "name twice": tensor_bytes(
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}}',
        EIGHT,
    ),
    "entry of text": tensor_bytes(b'{"a":"F32"}'),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
@pytest.mark.smoke
def test_bad_safetensors_are_refused_by_name(checkpoint, name, tmp_path, all_commands_refuse):
    file = manifests.tensor_file(checkpoint)
    file.write_bytes(BAD_TENSORS[name])
    manifests.relist(checkpoint, file.name)
    all_commands_refuse(checkpoint, re.escape(file.name), ("verify", "export"))
    (tmp_path / "model.safetensors").write_bytes(BAD_TENSORS[name])
    with pytest.raises(UserError, match=r"model\.safetensors"):
        weight_map(tmp_path)


def test_tensors_are_not_allocated_by_what_a_manifest_claims(checkpoint):
    """Without reading the files first: a file's own header decides."""
    file = manifests.tensor_file(checkpoint)
    file.write_bytes(BAD_TENSORS["header of 1 GB"])
    manifests.relist(checkpoint, file.name)
    out = str(checkpoint.parent / "out")

    def refuse() -> None:
        assert smp.cli.main(["export", str(checkpoint), out, "--verify", "size"]) == 2
        assert smp.cli.main(["diff", str(checkpoint), str(checkpoint), "--values"]) == 2

    in_child(refuse, headroom=300 << 20)
    assert not os.path.exists(out)


# --------------------------------------------------------------------------------------------- Hugging Face directories


@pytest.fixture
def model(tmp_path):
    """A directory with two shards and their index."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.zeros(2)}, folder / "model-1.safetensors")
    save_file({"b": torch.zeros(2)}, folder / "model-2.safetensors")
    index(folder, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    assert {key: file.name for key, file in weight_map(folder).items()} == json.loads(
        (folder / "model.safetensors.index.json").read_text()
    )["weight_map"]
    return folder


def index(folder: pathlib.Path, entries: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": entries}))


@pytest.mark.parametrize(
    ("entries", "what"),
    [
        ({"a": "../model.safetensors"}, "not in its own directory"),
        ({"a": "/etc/passwd"}, "not in its own directory"),
        ({"a": ".."}, "no .safetensors file"),
        ({"a": "pytorch_model.bin"}, "no .safetensors file"),
        ({"a": "absent.safetensors"}, "which is missing"),
        ({"a": "model-2.safetensors", "b": "model-2.safetensors"}, "names a in model-2.* but no shard has it"),
        ({"a": "model-2.safetensors", "b": "model-1.safetensors"}, "but model-1.safetensors has it"),
        ({"a": 1}, "no usable weight_map"),
        (["a"], "no usable weight_map"),
        ("a", "no usable weight_map"),
        (None, "no usable weight_map"),
    ],
)
def test_an_index_that_lies_is_refused(model, entries, what):
    index(model, entries)
    with pytest.raises(UserError, match=what) as caught:
        weight_map(model)
    assert "index.json" in str(caught.value)


def test_a_tensor_in_two_shards_is_refused(model):
    save_file({"a": torch.ones(2), "b": torch.zeros(2)}, model / "model-2.safetensors")
    with pytest.raises(UserError, match=r"a is in both .*model-1\.safetensors and model-2\.safetensors"):
        weight_map(model)


BAD_JSON = {
    "twice": b'{"weight_map": {"a": "model-1.safetensors"}, "weight_map": {}}',
    "deep": b'{"weight_map": ' + b"[" * 200_000,
    "not UTF-8": b'{"weight_map": "\xff"}',
    "list": b"[]",
    "number": b"1",
    "empty": b"",
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_json_that_is_none_is_refused(model, name):
    (model / "model.safetensors.index.json").write_bytes(BAD_JSON[name])
    with pytest.raises(UserError, match=r"index\.json is no index"):
        weight_map(model)
    (model / "config.json").write_bytes(BAD_JSON[name].replace(b"weight_map", b"model_type"))
    with pytest.raises(UserError, match=r"config\.json"):
        resolve_model(ModelConfig(model=str(model)))


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "config.json"])
def test_json_of_any_size_is_refused_in_bounded_memory(model, name):
    sparse(model / name, 10 << 30, b'{"weight_map": {')
    action = (lambda: weight_map(model)) if "index" in name else lambda: resolve_model(ModelConfig(model=str(model)))
    in_child(lambda: refused_by(action, rf"{name}.*10737418240 bytes are more than"), headroom=200 << 20)


def test_a_pipe_is_not_waited_for(model):
    (model / "model.safetensors.index.json").unlink()
    os.mkfifo(model / "model.safetensors.index.json")
    with pytest.raises(ValueError, match="no regular file"):
        read_json(model / "model.safetensors.index.json")
    with pytest.raises(UserError, match=r"index\.json .*no regular file"):
        weight_map(model)


def config(folder: pathlib.Path, **changes: Any) -> str:
    """A Hugging Face directory with a small config."""
    values = LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values.to_dict() | changes))
    return str(folder)


BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}, "auto_map"),
    ({"model_type": "evil"}, "architecture 'evil' is not supported"),
    ({"model_type": ["llama"]}, "is not supported"),
    ({"num_hidden_layers": -1}, "num_hidden_layers must be an integer from 1 to 10000, got -1"),
    ({"num_hidden_layers": 10**12}, "num_hidden_layers must be"),
    ({"num_attention_heads": 0}, "num_attention_heads must be"),
    ({"hidden_size": 2**70}, "hidden_size must be"),
    ({"hidden_size": 32.5}, "hidden_size must be"),
    ({"hidden_size": True}, "hidden_size must be"),
    ({"vocab_size": 10**18}, "vocab_size must be"),
    ({"vocab_size": -1, "intermediate_size": 0}, "vocab_size must be.*; intermediate_size must be"),
    ({"max_position_embeddings": 10**20}, "max_position_embeddings must be"),
    ({"rope_parameters": "evil"}, "refused|rope"),
    ({"rope_parameters": {"rope_type": "../evil", "rope_theta": 1.0}}, "refused|rope"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, "refused by transformers"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": None}}, "partial_rotary"),
    ({"dtype": 2.5}, "refused by transformers"),
    ({"id2label": -1}, "refused by transformers"),
    ({"hidden_act": "../evil"}, "refused by transformers"),
]


@pytest.mark.parametrize(("changes", "what"), BAD_CONFIGS)
def test_a_config_that_lies_is_refused(tmp_path, changes, what):
    with pytest.raises(UserError, match=what):
        resolve_model(ModelConfig(model=config(tmp_path / "m", **changes)))


CODE = "import pathlib\npathlib.Path({!r}).touch()\nclass Config: pass\nclass Tokenizer: pass\n"


def test_code_in_a_model_is_not_run(tmp_path, canary):
    folder = pathlib.Path(config(tmp_path / "m", auto_map={"AutoConfig": "evil.Config"}))
    (folder / "evil.py").write_text(CODE.format(str(canary[1])))
    resolve_model(ModelConfig(model=str(folder)))
    assert not canary[1].exists()
    config(folder, model_type="evil", auto_map={"AutoConfig": "evil.Config"})
    with pytest.raises(
        UserError, match=r"config\.json is of a type .* asks to run code from the checkpoint .auto_map."
    ):
        resolve_model(ModelConfig(model=str(folder)))
    assert not canary[1].exists()


def test_code_beside_a_tokenizer_is_not_run(tmp_path, canary):
    folder = tmp_path / "m"
    shutil.copytree(pathlib.Path(__file__).parents[2] / "data" / "sample" / "tokenizer", folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": ["evil.Tokenizer", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config(folder, auto_map={"AutoConfig": "evil.Config", "AutoTokenizer": ["evil.Tokenizer", None]})
    (folder / "evil.py").write_text(CODE.format(str(canary[1])))
    assert TextTokenizer(str(folder)).digest and not canary[1].exists()


def test_an_attention_function_from_a_hub_is_not_fetched(tmp_path):
    resolved = resolve_model(ModelConfig(model=config(tmp_path / "m", _attn_implementation="evil/kernel")))
    assert resolved.attn_implementation == "sdpa" and "evil" not in str(resolved.hf_config.to_dict())


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}},
        {"tokenizer_config.json": {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}},
        {"tokenizer_config.json": {}, "config.json": {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}},
        {"tokenizer.json": "[" * 100_000},
        {"tokenizer.json": {"model": {"type": "Evil"}}},
        {"tokenizer.json": "[]", "tokenizer_config.json": "[]"},
        {"vocab.pkl": "x"},
    ],
)
def test_a_tokenizer_that_is_none_is_refused(tmp_path, files, canary):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    (folder / "evil.py").write_text(CODE.format(str(canary[1])))
    with pytest.raises(UserError, match=str(folder)):
        TextTokenizer(str(folder))
    assert not canary[1].exists()


def test_a_tokenizer_of_any_size_is_refused(tmp_path):
    sparse(tmp_path / "tokenizer.json", 10 << 30)
    in_child(lambda: refused_by(lambda: TextTokenizer(str(tmp_path)), "has 10737418240 bytes"), headroom=200 << 20)


# ----------------------------------------------------------------------------------------------------------------- data


@pytest.fixture(scope="module")
def bomb(tmp_path_factory):
    """200 MiB of one letter without a line end, in a file of 200 KB."""
    file = tmp_path_factory.mktemp("bomb") / "bomb.gz"
    with gzip.open(file, "wb", compresslevel=1) as out:
        for _ in range(200):
            out.write(b"a" * (1 << 20))
    return file


def test_a_bomb_in_json_lines_is_refused(bomb, tmp_path):
    file = list_files(str(link(bomb, tmp_path / "bomb.jsonl.gz")), extensions=(".jsonl",))[0]
    sentence = rf"bomb\.jsonl\.gz, line 1: has more than {MAX_LINE >> 20} MiB"
    in_child(lambda: refused_by(lambda: list(LINES.read(file, ())), sentence), headroom=4 * MAX_LINE)


def link(source: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    os.link(source, target)
    return target


def test_a_bomb_in_text_is_read_in_pieces(bomb, tmp_path):
    file = list_files(str(link(bomb, tmp_path / "bomb.txt.gz")), extensions=(".txt",))[0]

    def read() -> None:
        assert sum(len(text) for (text, _), _ in read_text(file, None)) == 200 << 20

    in_child(read, headroom=50 << 20)


@pytest.mark.parametrize(
    "line", [b"[" * 100_000, b'{"input_ids": ' + b"[" * 100_000, b'{"input_ids": [' + b"9" * 10_000 + b"]}"]
)
def test_json_lines_that_are_none_are_refused(tmp_path, line):
    (tmp_path / "a.jsonl").write_bytes(line + b"\n")
    file = list_files(str(tmp_path), extensions=(".jsonl",))[0]
    with pytest.raises(UserError, match=r"a\.jsonl, line 1: not valid JSON"):
        list(LINES.read(file, ()))


@pytest.mark.parametrize(
    ("state", "what"),
    [
        ({"_data_files": [{"filename": "../secret.arrow"}]}, "no name of a file beside it"),
        ({"_data_files": [{"filename": "/etc/passwd"}]}, "no name of a file beside it"),
        ({"_data_files": [{"filename": "memory://x"}]}, "no name of a file beside it"),
        ({"_data_files": [{"filename": ".."}]}, "no name of a file beside it"),
        ({"_data_files": [{"filename": 1}]}, "no name of a file beside it"),
        ({"_data_files": ["x"]}, "no name of a file beside it"),
        ({"_data_files": []}, "no name of a file beside it"),
        ({}, "no name of a file beside it"),
        ([], "instead of an object"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_saved_dataset_that_lies_is_refused(tmp_path, state, what):
    (tmp_path / "state.json").write_text(state if isinstance(state, str) and state[0] in "[{" else json.dumps(state))
    with pytest.raises(UserError, match=what) as caught:
        saved_files(str(tmp_path), "train")
    assert "state.json" in str(caught.value)


def test_a_saved_dataset_with_splits_elsewhere_is_refused(tmp_path):
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["../train"]}))
    with pytest.raises(UserError, match=r"dataset_dict\.json lists '\.\./train'"):
        saved_files(str(tmp_path), "train")


def make_cache(folder: pathlib.Path) -> tuple[pathlib.Path, Callable[[], TokenFile]]:
    """A token file in a cache, and what opens it again."""

    def build(writer: Any) -> None:
        writer.add(np.array([1, 2, 3]), [3])

    def ask() -> TokenFile:
        return cached(str(folder), "x", ["key"], build, dtype="uint16")

    return ask().folder, ask


BAD_META = {
    "objects": put("dtype", value="object"),
    "wide": put("dtype", value="float64"),
    "floats": put("dtype", value="float16"),
    "signed": put("dtype", value="int16"),
    "structure": put("dtype", value=[["a", "O"]]),
    "path": lambda meta: meta["counts"].__setitem__("../../etc/passwd", 1),
    "fewer rows": put("counts", "rows", value=1),
    "negative": put("counts", "tokens", value=-3),
    "no tokens": lambda meta: meta["counts"].pop("tokens"),
    "counts list": put("counts", value=[]),
    "counts text": put("counts", "tokens", value="3"),
    "highest text": put("highest", value="many"),
}


@pytest.mark.parametrize("name", BAD_META)
def test_a_token_cache_that_lies_is_built_again(tmp_path, name, caplog):
    folder, ask = make_cache(tmp_path)
    meta = json.loads((folder / "meta.json").read_text())
    BAD_META[name](meta)
    (folder / "meta.json").write_text(json.dumps(meta))
    assert ask().tokens.tolist() == [1, 2, 3] and "is built again" in caplog.text


def test_rows_beyond_the_tokens_are_built_again(tmp_path, caplog):
    folder, ask = make_cache(tmp_path)
    np.array([0, 10**12], np.int64).tofile(folder / "rows.bin")
    assert ask().offsets.tolist() == [0, 3] and "is built again" in caplog.text


@pytest.mark.parametrize("content", [b"{", b"[" * 100_000, b'{"a": 1, "a": 2}'])
def test_a_recorded_result_that_is_none_is_computed_again(tmp_path, content, caplog):
    assert recorded(str(tmp_path), "x", ["key"], lambda: [1]) == [1]
    file = next(path for path in tmp_path.iterdir() if path.suffix != ".lock")
    file.write_bytes(content)
    assert recorded(str(tmp_path), "x", ["key"], lambda: [2]) == [2] and "is built again" in caplog.text
    assert json.loads(file.read_bytes()) == [2]


def test_no_code_of_ours_unpickles():
    """No pickle is read anywhere: the words that would do it are not in the sources."""
    root = pathlib.Path(smp.cli.__file__).parents[2]
    words = r"\bpickle\.loads?\b|\btorch\.load\b|\bnp\.load\b|allow_pickle|\byaml\.load\b|\bmarshal\.|\bdill\b"
    sources = [*root.glob("*.py"), *root.glob("smp/**/*.py"), *root.glob("data/**/*.py")]
    assert len(sources) > 50 and not [p for p in sources if re.search(words, p.read_text())]
