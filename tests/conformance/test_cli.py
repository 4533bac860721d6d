"""The ``smp`` command on real runs: verify, inspect, export, diff; their exit statuses and what they say."""

from __future__ import annotations

import json
import math
import os
import pathlib
import re
import shutil

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import smp.cli
import smp.cli.diff
from smp.checkpoint import hf_export
from smp.checkpoint.manifest import read_manifest
from smp.checkpoint.reader import CheckpointReader
from smp.cli.checkpoints import LocalCheckpoint
from smp.cli.diff import compare_tensor, gap_of
from smp.cli.export import parse_size
from smp.errors import UserError
from tests import experts, manifests
from tests.job import LLAMA, run_job

FLAGS = ["--use_synthetic_data", 1, "--max_steps", 4, "--checkpoint_freq", 2, "--num_kept_checkpoints", 5]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of two processes with checkpoints of steps 2 and 4 and a final model; never changed."""
    root = tmp_path_factory.mktemp("cli") / "run"
    run_job(*LLAMA, *FLAGS, "--output_dir", root, "--save_final_model", 1, world_size=2).succeeded()
    return root


@pytest.fixture
def checkpoint(run_dir, tmp_path):
    """A copy of the last checkpoint, to be spoilt."""
    return manifests.copy(run_dir / "checkpoints" / "llama_v2-4steps", tmp_path)


@pytest.fixture
def call(capsys):
    """Run the command in this process: (status, lines on stdout, lines on stderr)."""

    def run(*words: object) -> tuple[int, list[str], list[str]]:
        status = smp.cli.main([str(word) for word in words])
        out, err = capsys.readouterr()
        return status, out.splitlines(), err.splitlines()

    return run


@pytest.fixture
def refused(call):
    """Run the command, which must refuse with one sentence."""

    def run(*words: object) -> str:
        status, out, err = call(*words)
        assert status == 2 and out == [] and len(err) == 1 and err[0].startswith("error: "), (status, out, err)
        return err[0]

    return run


# ------------------------------------------------------------------------------------------------------------------ smp


@pytest.mark.smoke
def test_bad_words_are_refused_in_one_sentence(refused, run_dir):
    assert "invalid choice: 'verifi'" in refused("verifi", run_dir)
    assert "unrecognized arguments: --quik" in refused("verify", run_dir, "--quik")
    assert "required: directory" in refused("verify")
    for words in (["export", run_dir], ["export", run_dir, "--output", "x"], ["export", run_dir, "x", "y"]):
        assert "`smp export --help` shows" in refused(*words)
    assert "`smp launch local --help` shows" in refused("launch", "local", "--nodes", 2)
    assert "does not exist: give the directory of a checkpoint" in refused("verify", run_dir / "absent")
    assert "is a file" in refused("inspect", run_dir / "config.yaml")


# --------------------------------------------------------------------------------------------------------------- verify


@pytest.mark.smoke
def test_a_good_checkpoint_is_whole(call, run_dir):
    status, out, err = call("verify", run_dir / "checkpoints" / "llama_v2-4steps")
    assert status == 0 and err == [] and len(out) == 1
    assert re.fullmatch(r"llama_v2-4steps: valid \(2 files, \d+\.\d KiB, \d+\.\d s\)", out[0]), out
    status, out, _ = call("verify", *(run_dir / "checkpoints" / name for name in ("latest", "llama_v2-2steps")))
    assert status == 0 and [line.split(" (")[0] for line in out] == ["llama_v2-4steps: valid", "llama_v2-2steps: valid"]


@pytest.mark.parametrize("below", ["", "checkpoints"])
def test_a_directory_of_checkpoints_gets_a_line_each(call, run_dir, below):
    status, out, _ = call("verify", run_dir / below)
    prefix = "" if below else "checkpoints/"
    assert status == 0 and [line.split(":")[0] for line in out] == [f"{prefix}llama_v2-{n}steps" for n in (2, 4)]


def spoil(path: pathlib.Path, how: str) -> None:
    """Damage one file of a checkpoint, or its directory."""
    size = path.stat().st_size
    if how == "flip":
        with path.open("r+b") as file:
            file.seek(size * 2 // 3)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 4]))
    elif how == "truncate":
        os.truncate(path, size - 1)
    elif how == "extend":
        path.write_bytes(path.read_bytes() + b"\0")
    elif how == "delete":
        path.unlink()
    elif how == "add":
        shutil.copy(path, path.with_name("rank00007-000.safetensors"))
    elif how == "link":
        path.rename(path.parent.parent / path.name)
        path.symlink_to(path.parent.parent / path.name)


@pytest.mark.parametrize("how", ["flip", "truncate", "extend", "delete", "add", "link"])
def test_damage_is_named_by_file(call, checkpoint, how):
    for name in sorted(os.listdir(checkpoint)):
        copy = manifests.copy(checkpoint, checkpoint.parent / f"{how}-{name}")
        spoil(copy / name, how)
        status, out, err = call("verify", copy)
        if name == "manifest.json" and how == "delete":
            assert status == 1 and "it has no manifest.json" in out[1]
            continue
        assert status == 1 and out[0] == "llama_v2-4steps: damaged" and err == [], (name, out)
        wanted = "rank00007-000.safetensors" if how == "add" else name
        assert wanted in out[1], (name, out)


def test_quick_reads_no_tensors(call, checkpoint):
    file = manifests.tensor_file(checkpoint)
    spoil(file, "flip")
    status, out, _ = call("verify", "--quick", checkpoint)
    assert status == 0 and "complete" in out[0] and "sizes only" in out[0]
    spoil(file, "truncate")
    assert call("verify", "--quick", checkpoint)[0] == 1


def test_one_that_its_run_deletes_meanwhile_is_not_called_damaged(call, refused, checkpoint, tmp_path, monkeypatch):
    another, problems_of = manifests.copy(checkpoint, tmp_path / "another"), LocalCheckpoint.problems_of

    def too_late(self, *of):
        shutil.rmtree(self.path, ignore_errors=True)
        return problems_of(self, *of)

    monkeypatch.setattr(LocalCheckpoint, "problems_of", too_late)
    status, out, _ = call("verify", checkpoint)
    assert (status, out) == (0, ["llama_v2-4steps: deleted meanwhile, as its run keeps newer ones"])
    assert "4steps was deleted while it was read, as its run keeps newer ones" in refused(
        "export", another, tmp_path / "out"
    )


def test_files_of_another_checkpoint_are_found(call, run_dir, checkpoint):
    other = run_dir / "checkpoints" / "llama_v2-2steps"
    name = manifests.tensor_file(other).name
    shutil.copy(other / name, checkpoint / name)
    status, out, _ = call("verify", checkpoint)
    assert status == 1 and [line.split()[0] for line in out[1:]] == [name]
    shutil.copytree(other, checkpoint, dirs_exist_ok=True)
    status, out, _ = call("verify", checkpoint)
    assert status == 1 and "its manifest is of step 2" in out[1]


def test_a_header_that_is_not_the_manifests_is_found(call, checkpoint):
    manifests.change(checkpoint, lambda content: content["tensors"]["model.model.norm.weight"].__setitem__(0, "I32"))
    status, out, _ = call("verify", checkpoint)
    assert status == 1 and re.search(r"rank0000\d-000.safetensors and the manifest differ about model.model.n", out[1])


def test_one_damaged_of_several(call, run_dir, tmp_path):
    shutil.copytree(run_dir / "checkpoints", tmp_path / "checkpoints", symlinks=True)
    spoil(manifests.tensor_file(tmp_path / "checkpoints" / "llama_v2-2steps"), "flip")
    (tmp_path / "checkpoints" / "llama_v2-3steps").mkdir()
    (tmp_path / "checkpoints" / "llama_v2-6steps.tmp").mkdir()
    status, out, err = call("verify", tmp_path)
    assert status == 1 and err == []
    assert [line for line in out if not line.startswith(" ")] == [
        "checkpoints/llama_v2-2steps: damaged",
        "checkpoints/llama_v2-3steps: not complete",
        next(line for line in out if line.startswith("checkpoints/llama_v2-4steps: valid (")),
        "checkpoints/llama_v2-6steps.tmp: left by an interrupted save, and removed by the next start",
        "2 of 3 checkpoints cannot be resumed from",
    ]


def test_a_copy_under_another_name_is_checked(call, run_dir, tmp_path):
    for name in ("latest", "llama_v2-4steps.aside1", "llama_v2-4steps.old.tmp"):
        shutil.copytree(run_dir / "checkpoints" / "llama_v2-4steps", tmp_path / name)
    spoil(manifests.tensor_file(tmp_path / "latest"), "flip")
    status, out, _ = call("verify", tmp_path)
    assert status == 1 and out[0] == "latest: damaged" and len(out) == 3, out
    assert [line.split()[:2] for line in call("inspect", tmp_path)[1][1:]] == [["latest", "4"]]


def test_one_without_a_manifest(call, tmp_path):
    (tmp_path / "m-3steps").mkdir()
    status, out, err = call("verify", tmp_path / "m-3steps")
    assert status == 1 and err == [] and out[0] == "m-3steps: not complete" and len(out) == 2
    assert "is not a complete checkpoint: it has no manifest.json" in out[1]


def test_checkpoints_of_single_ranks(call, refused, tmp_path):
    words = ["--use_synthetic_data", 1, "--max_steps", 1, "--output_dir", tmp_path, "--checkpoint_type", "local"]
    run_job(*LLAMA, *words, world_size=2).succeeded()
    status, out, _ = call("verify", tmp_path)
    names = [f"checkpoints/rank0000{rank}-of-00002/llama_v2-1steps" for rank in (0, 1)]
    assert status == 0 and [line.split(": valid")[0] for line in out] == names
    assert [line.split()[:3] for line in call("inspect", tmp_path)[1][1:]] == [[name, "1", "local"] for name in names]
    assert "is a local checkpoint, which has the state of one rank" in refused(
        "export", tmp_path / names[1], tmp_path / "o"
    )
    said = refused("diff", "--values", *(tmp_path / name for name in names))
    assert "is a local checkpoint, which has the state of one rank: --values needs sharded ones" in said
    assert call("diff", *(tmp_path / name for name in names))[0] == 1
    spoil(manifests.tensor_file(tmp_path / names[1]), "flip")
    status, out, _ = call("verify", tmp_path)
    assert status == 1 and out[0].startswith(f"{names[0]}: valid") and out[1] == f"{names[1]}: damaged"


def test_what_is_no_checkpoint(refused, run_dir):
    assert "is not a checkpoint and contains none" in refused("verify", run_dir / "final")


# -------------------------------------------------------------------------------------------------------------- inspect


def test_inspect_without_reading_tensors(call, run_dir, checkpoint):
    for file in checkpoint.glob("*.safetensors"):
        size = file.stat().st_size
        file.write_bytes(b"")
        os.truncate(file, size)
    status, out, _ = call("inspect", checkpoint)
    assert status == 0 and out[0] == "llama_v2-4steps"
    lines = {line[:16].strip(): line[16:].strip() for line in out[1:] if re.match("  [a-z]", line)}
    assert lines["step"] == "4" and lines["kind"] == "sharded" and lines["state"] == "complete", out
    assert re.search(r"by .*torch 2\.", lines["saved"]) and "2 (" in lines["processes"]
    parameters = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(run_dir / "final").parameters())
    assert f"llama_v2 (llama), {parameters:,} parameters, float32" in lines["model"]


def test_inspect_as_json(call, run_dir, checkpoint):
    status, out, _ = call("inspect", "--json", "--tensors", checkpoint)
    found = json.loads("\n".join(out))
    manifest = read_manifest(checkpoint)
    assert status == 0 and found["step"] == 4 and found["world_size"] == 2
    assert found["run"]["progress"]["step"] == 4 and found["settings"]["hidden_width"] == 32
    assert {name: entry["size"] for name, entry in found["files"].items()} == {
        file.name: file.stat().st_size for file in checkpoint.glob("*.safetensors")
    }
    embedding = found["tensors"]["model.model.embed_tokens.weight"]
    assert embedding["shape"] == [64, 32] and embedding["dtype"] == "float32" and len(embedding["chunks"]) == 2
    assert found["tensors"].keys() == manifest.tensors.keys()


def test_inspect_lists_tensors(call, checkpoint):
    _, out, _ = call("inspect", "--tensors", checkpoint)
    row = next(line.split() for line in out if "model.model.embed_tokens.weight" in line)
    assert row == ["model.model.embed_tokens.weight", "64x32", "float32", "2", "parts"]


def test_inspect_a_directory_of_checkpoints(call, run_dir, tmp_path):
    shutil.copytree(run_dir / "checkpoints", tmp_path / "checkpoints", symlinks=True)
    manifests.tensor_file(tmp_path / "checkpoints" / "llama_v2-2steps").unlink()
    status, out, _ = call("inspect", tmp_path)
    assert status == 0 and len(out) == 3 and out[0].split()[:3] == ["checkpoint", "step", "kind"]
    assert "is missing" in out[1] and out[2].split()[:3] == ["checkpoints/llama_v2-4steps", "4", "sharded"]
    assert out[2].endswith("complete")
    summaries = json.loads("\n".join(call("inspect", "--json", tmp_path)[1]))
    assert [summary["step"] for summary in summaries] == [2, 4]


def test_inspect_a_hugging_face_model(call, run_dir):
    status, out, _ = call("inspect", run_dir / "final", "--tensors")
    model = AutoModelForCausalLM.from_pretrained(run_dir / "final")
    parameters = sum(p.numel() for p in model.parameters())
    assert status == 0 and any(f"llama, {parameters:,} parameters, float32" in line for line in out), out
    assert sum("model.layers.0" in line for line in out) == sum("layers.0" in n for n, _ in model.named_parameters())


def test_inspect_a_mixture(call, tmp_path):
    experts.build("mixtral", torch.float32).save_pretrained(tmp_path / "mixtral")
    status, out, _ = call("inspect", tmp_path / "mixtral", "--tensors")
    assert status == 0 and any("mixtral, 126,944 parameters (44,000 active for a token), float32" in x for x in out), (
        out
    )
    assert any("experts.7.w2.weight" in line for line in out)  # as the files have it


def test_nothing_of_a_checkpoint_steers_the_terminal(call, checkpoint):
    def mutate(content):
        content["model"]["name"] = "\x1b[2J\x1b]0;owned\x07name"
        content["run"]["data"] = "a\nb\r"

    manifests.change(checkpoint, mutate)
    text = "\n".join(call("inspect", checkpoint)[1])
    assert "\x1b" not in text and "\r" not in text and "?[2J?]0;owned?name" in text and "a?b?" in text


# --------------------------------------------------------------------------------------------------------------- export


def logits(directory, dtype=torch.float32):
    model, info = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        return model.eval()(torch.arange(32).reshape(2, 16)).logits


@pytest.mark.smoke
def test_the_export_is_the_jobs_own_final_model(call, run_dir, tmp_path):
    status, out, err = call("export", run_dir / "checkpoints" / "latest", tmp_path / "out")
    assert status == 0 and err == [] and out[0].startswith("Exported step 4 of llama_v2-4steps to "), (out, err)
    assert not dist.is_initialized()
    assert torch.equal(logits(tmp_path / "out"), logits(run_dir / "final"))
    theirs, mine = (load_file(folder / "model.safetensors") for folder in (run_dir / "final", tmp_path / "out"))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == json.loads((run_dir / "final" / "config.json").read_text())
    assert sorted(os.listdir(tmp_path / "out")) == sorted(os.listdir(run_dir / "final"))


def test_an_earlier_step_has_its_own_weights(call, run_dir, tmp_path):
    assert call("export", run_dir / "checkpoints" / "llama_v2-2steps", tmp_path / "out")[0] == 0
    assert not torch.equal(logits(tmp_path / "out"), logits(run_dir / "final"))


def test_files_dtype_and_tokenizer(call, run_dir, tmp_path):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    words = ["--dtype", "bf16", "--max_shard_size", "8KB", "--tokenizer", tmp_path / "tokenizer", "--verify", "size"]
    assert call("export", run_dir / "checkpoints" / "latest", tmp_path / "out", *words)[0] == 0
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 3 and (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    tensors = {key: value for file in files for key, value in load_file(file).items()}
    final = load_file(run_dir / "final" / "model.safetensors")
    assert tensors.keys() == final.keys()
    assert all(torch.equal(tensors[key], final[key].bfloat16()) for key in final)
    for file in files:
        assert len(load_file(file)) == 1 or sum(t.nbytes for t in load_file(file).values()) <= 8000
    assert logits(tmp_path / "out", torch.bfloat16).isfinite().all()


def test_the_tokenizer_of_the_run_comes_along(call, tmp_path):
    (tmp_path / "tokenizer").mkdir()
    for name in ("tokenizer.json", "spiece.model"):
        (tmp_path / "tokenizer" / name).write_text("{}")
    words = [*LLAMA, *FLAGS[:2], "--max_steps", 1, "--tokenizer_name_or_dir", tmp_path / "tokenizer"]
    run_job(*words, "--output_dir", tmp_path / "run", "--save_final_model", 1).succeeded()
    status, out, _ = call("export", tmp_path / "run/checkpoints/latest", tmp_path / "out")
    assert status == 0 and out[1] == f"Tokenizer: that of the run, {tmp_path / 'tokenizer'}"
    for folder in ("run/final", "out"):
        assert (tmp_path / folder / "tokenizer.json").exists() and (tmp_path / folder / "spiece.model").exists()
    # A model's own settings of generation stay with it, wherever the tokenizer is.
    kept = '{"eos_token_id": [0, 5, 9], "temperature": 0.6, "do_sample": true}'
    (tmp_path / "run/final/generation_config.json").write_text(kept)
    words = ["--hf_pretrained_model_name_or_dir", tmp_path / "run/final", *FLAGS[:2], "--max_steps", 1]
    words += ["--tokenizer_name_or_dir", tmp_path / "tokenizer", "--save_final_model", 1]
    run_job(*words, "--output_dir", tmp_path / "tuned").succeeded()
    assert call("export", tmp_path / "tuned/checkpoints/latest", tmp_path / "again")[0] == 0
    for folder in ("tuned/final", "again"):
        assert (tmp_path / folder / "generation_config.json").read_text() == kept
    (tmp_path / "tokenizer" / "tokenizer.json").unlink()
    (tmp_path / "tokenizer" / "spiece.model").unlink()
    status, out, _ = call("export", tmp_path / "run/checkpoints/latest", tmp_path / "out")
    assert status == 0 and out[1] == "No tokenizer was copied: --tokenizer DIR does that"


@pytest.mark.parametrize("lora", [False, True])
def test_a_tensor_is_written_in_the_dtype_of_its_base(call, tmp_path, lora):
    """As peft merges and transformers saves; where the base is gone, in that of its config."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    ).to(torch.bfloat16)
    base.model.norm.float()
    base.save_pretrained(tmp_path / "base")
    words = ["--hf_pretrained_model_name_or_dir", tmp_path / "base", *FLAGS[:2], "--max_steps", 1, "--lr", 0.01]
    words += ["--max_context_width", 16, "--save_final_model", 1]
    words += ["--lora_rank", 2, "--save_merged_model", 1] if lora else []
    done = run_job(*words, "--output_dir", tmp_path / "run").succeeded()
    assert "The final model is in bfloat16, as its base; --dtype fp32 would write it as trained." in done.output
    checkpoint, merge = tmp_path / "run/checkpoints/latest", ["--merge"] if lora else []

    def dtypes(folder: str) -> dict[str, torch.dtype]:
        return {key: tensor.dtype for key, tensor in load_file(tmp_path / folder / "model.safetensors").items()}

    assert dtypes("run/final") == dtypes("base") and set(dtypes("base").values()) == {torch.bfloat16, torch.float32}
    assert json.loads((tmp_path / "run/final/config.json").read_text())["dtype"] == "bfloat16"
    assert call("export", checkpoint, tmp_path / "again", *merge)[0] == 0
    name = "model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "run/final" / name).read_bytes()
    assert call("export", checkpoint, tmp_path / "wide", *merge, "--dtype", "fp32")[0] == 0
    wide, final = (load_file(tmp_path / folder / name) for folder in ("wide", "run/final"))
    assert all(t.dtype == torch.float32 and torch.equal(t.to(final[key].dtype), final[key]) for key, t in wide.items())
    if lora:
        assert call("export", checkpoint, tmp_path / "adapter")[0] == 0
        adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        assert {tensor.dtype for tensor in adapter.values()} == {torch.float32}
        return
    run_job(*words, "--output_dir", tmp_path / "second", "--dtype", "fp32").succeeded()
    assert (tmp_path / "second/final" / name).read_bytes() == (tmp_path / "wide" / name).read_bytes()
    (tmp_path / "base").rename(tmp_path / "moved")
    assert call("export", checkpoint, tmp_path / "without")[0] == 0
    assert set(dtypes("without").values()) == {torch.bfloat16}


def test_memory_is_one_parameter_and_one_file(call, run_dir, tmp_path, monkeypatch):
    final = load_file(run_dir / "final" / "model.safetensors")
    reads, files, (read, write) = [], [], (CheckpointReader.read, hf_export._write_tensors)

    def tracked_read(self, name, *box):
        reads.append(name)
        return read(self, name, *box)

    def tracked_write(path, tensors):
        assert len(reads) == len(tensors)  # what was read since the last file is what this one gets
        files.append(sum(tensor.nbytes for tensor in tensors.values()))
        reads.clear()
        write(path, tensors)

    monkeypatch.setattr(CheckpointReader, "read", tracked_read)
    monkeypatch.setattr(hf_export, "_write_tensors", tracked_write)
    words = ["--max_shard_size", "10KB"]
    assert call("export", run_dir / "checkpoints" / "latest", tmp_path / "out", *words)[0] == 0
    assert max(files) <= 10_000 and sum(files) == sum(tensor.nbytes for tensor in final.values()) > 30_000


def test_what_cannot_be_exported(call, refused, run_dir, checkpoint, tmp_path):
    out = tmp_path / "out"
    assert "contains 2 checkpoint(s): give one of them" in refused("export", run_dir, out)
    assert "--max_shard_size 5XB is no size" in refused("export", checkpoint, out, "--max_shard_size", "5XB")
    assert "invalid choice: 'fp8'" in refused("export", checkpoint, out, "--dtype", "fp8")
    assert "contains no tokenizer files" in refused("export", checkpoint, out, "--tokenizer", tmp_path)
    assert "is in the checkpoint itself" in refused("export", checkpoint, checkpoint / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    assert "contains notes.txt" in refused("export", checkpoint, tmp_path / "mine")
    base = tmp_path / "base"
    assert call("export", checkpoint, base)[0] == 0
    name = "hf_pretrained_model_name_or_dir"
    manifests.change(checkpoint, lambda content: content["run"]["config"].__setitem__(name, str(base)))
    for target in (base, f"file://{base}"):
        assert f"{base} would be replaced, and the run's --{name} reads" in refused("export", checkpoint, target)
    spoil(manifests.tensor_file(checkpoint), "flip")
    assert "is damaged" in refused("export", checkpoint, out) and not out.exists()
    local = manifests.copy(run_dir / "checkpoints" / "llama_v2-2steps", tmp_path)
    manifests.change(local, lambda content: content.__setitem__("kind", "local"))
    assert "is a local checkpoint, which has the state of one rank" in refused("export", local, out)
    assert sorted(os.listdir(tmp_path)) == ["base", "llama_v2-2steps", "llama_v2-4steps", "mine"]


def test_a_checkpoint_that_is_not_its_model_is_refused(refused, checkpoint, tmp_path):
    manifests.change(checkpoint, lambda content: content["model"]["config"].__setitem__("num_hidden_layers", 3))
    text = refused("export", checkpoint, tmp_path / "out")
    assert "does not contain the parameters of the model it describes: model.layers.2." in text and "is missing" in text


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("500MiB", 500 << 20), ("1.5 kb", 1500), ("123", 123), ("2T", 2 * 10**12), ("1GiB", 1 << 30)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "GB", "-5GB", "5 apples", "1e9", "0.1", "inf", "9" * 400])
def test_bad_sizes(text):
    with pytest.raises(UserError, match="is no size"):
        parse_size(text)


# ----------------------------------------------------------------------------------------------------------------- diff


def test_a_checkpoint_equals_its_copy(call, run_dir, checkpoint):
    original = run_dir / "checkpoints" / "llama_v2-4steps"
    status, out, err = call("diff", original, checkpoint, "--values")
    count = len(read_manifest(original).tensors)
    assert status == 0 and err == [] and out[-1] == "equal"
    assert re.fullmatch(rf"values: all {count} tensors \(.*\) equal", out[-2]), out
    status, out, _ = call("diff", original, checkpoint)
    assert status == 0 and out[2:] == ["no differences in names and settings; values not compared (--values)"]


def test_two_steps_differ(call, run_dir):
    pair = [run_dir / "checkpoints" / f"llama_v2-{step}steps" for step in (2, 4)]
    status, out, _ = call("diff", *pair, "--values", "--show", 3)
    rows = {line.split()[0]: line.split()[1:] for line in out if line.startswith("  ")}
    assert status == 1 and rows["step"] == ["2", "4"] and rows["run.progress.step"] == ["2", "4"], out
    assert not any(name.startswith(("setting.", "model.vocab")) for name in rows)
    listed = [line.split() for line in out if re.match(r"  (model|optim|rng)\.", line)]
    assert len(listed) == 3 and any(re.match(r"  \.\.\. and \d+ more", line) for line in out)
    a, b = (manifests_tensor(path, listed[0][0]) for path in pair)
    assert float(listed[0][1]) == pytest.approx(float((a.double() - b.double()).abs().max()), rel=5e-3)
    assert int(listed[0][2]) == int((a != b).sum()) and int(listed[0][4]) == a.numel()


def manifests_tensor(path: pathlib.Path, name: str) -> torch.Tensor:
    with CheckpointReader(path, read_manifest(path)) as reader:
        return reader.read(name)


def test_settings_that_differ_are_named(call, run_dir, checkpoint):
    def mutate(content):
        content["run"]["config"] |= {"lr": 0.5, "output_dir": "/elsewhere"}
        content["saved_at"] = "2001-01-01T00:00:00+00:00"

    manifests.change(checkpoint, mutate)
    original = run_dir / "checkpoints" / "llama_v2-4steps"
    status, out, _ = call("diff", original, checkpoint)
    assert status == 1 and any(re.match(r"  setting\.lr +0\.0001 +0\.5$", line) for line in out), out
    manifests.change(checkpoint, lambda content: content["run"]["config"].__setitem__("lr", 0.0001))
    status, out, _ = call("diff", original, checkpoint)
    assert status == 0 and any("setting.output_dir" in line for line in out) and any("saved_at" in line for line in out)


def test_one_bit_is_found(call, run_dir, checkpoint):
    file = manifests.tensor_file(checkpoint)
    spoil(file, "flip")
    manifests.relist(checkpoint, file.name)
    status, out, _ = call("diff", run_dir / "checkpoints" / "llama_v2-4steps", checkpoint, "--values")
    assert status == 1 and re.search(r" 1 of \d+$", out[-1]), out
    assert call("verify", checkpoint)[0] == 0  # a digest is no protection against an author


def test_tensors_of_other_names_shapes_and_dtypes(call, run_dir, tmp_path):
    base = run_dir / "final"
    other = pathlib.Path(shutil.copytree(base, tmp_path / "other"))
    from safetensors.torch import save_file

    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].half()
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:10].contiguous()
    tensors["more.weight"] = tensors.pop("model.layers.0.input_layernorm.weight")
    save_file(tensors, other / "model.safetensors")
    status, out, _ = call("diff", base, other, "--values")
    text = "\n".join(out)
    assert status == 1 and "tensors only in A: 1\n  model.model.layers.0.input_layernorm.weight\n" in text
    assert "tensors only in B: 1\n  model.more.weight\n" in text
    assert "model.lm_head.weight: float32 (64, 32), float32 (10, 32)" in text
    assert "model.model.norm.weight: float32 (32,), float16 (32,)" in text


def test_a_checkpoint_and_its_exports(call, run_dir, tmp_path):
    checkpoint = run_dir / "checkpoints" / "llama_v2-4steps"
    status, out, _ = call("diff", checkpoint, run_dir / "final", "--values")
    assert status == 0 and out[-1] == "equal", out
    assert call("export", checkpoint, tmp_path / "half", "--dtype", "bf16")[0] == 0
    status, out, _ = call("diff", checkpoint, tmp_path / "half", "--values")
    gaps = [float(line.split()[1]) for line in out if re.match(r"  model\..* of \d+$", line)]
    assert status == 1 and any("float32 (64, 32), bfloat16 (64, 32)" in line for line in out)
    assert gaps and 0 < max(gaps) < 0.01
    # Of the configuration what a trained model computes with counts, and what a file leaves out is its default.
    file = tmp_path / "half" / "config.json"
    config = {key: value for key, value in json.loads(file.read_text()).items() if key != "rope_parameters"}
    file.write_text(json.dumps(config | {"head_dim": None, "hidden_act": "gelu", "use_cache": True}))
    _, out, _ = call("diff", checkpoint, tmp_path / "half")
    assert [line.split()[0] for line in out if line.startswith("  model.") and "(" not in line] == ["model.hidden_act"]


def test_what_cannot_be_compared(refused, run_dir, tmp_path):
    latest = run_dir / "checkpoints" / "latest"
    assert "is not a checkpoint and contains none" in refused("diff", latest, tmp_path)
    assert "--show must be at least 1" in refused("diff", latest, latest, "--show", 0)


class Held:
    """A tensor as what a checkpoint holds."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor, self.entries = tensor, {"t": tensor}

    def read(self, name: str) -> torch.Tensor:
        return self.tensor


def test_values_are_compared_bit_by_bit_in_blocks(monkeypatch):
    monkeypatch.setattr(smp.cli.diff, "BLOCK", 6)
    a = torch.arange(21, dtype=torch.float32).reshape(7, 3)
    b = a.clone()
    assert compare_tensor(Held(a), Held(b), "t").count == 0
    b[6, 2] += 8
    b[0, 0] = -0.0
    b[1, 1] = math.nan
    gap = compare_tensor(Held(a), Held(b), "t")
    assert (gap.count, gap.total, gap.largest) == (3, 21, math.inf)
    b[1, 1] = a[1, 1]
    assert compare_tensor(Held(a), Held(b), "t").largest == 8.0
    nans = torch.full((3,), math.nan)
    assert gap_of(nans, nans.clone()) == (0, 0.0) and gap_of(nans, torch.zeros(3)) == (3, math.inf)
    assert gap_of(torch.tensor(3), torch.tensor(5)) == (1, 2.0)
    assert gap_of(torch.tensor([True]), torch.tensor([False])) == (1, 1.0)
    assert gap_of(torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.bfloat16)) == (0, 0.0)
