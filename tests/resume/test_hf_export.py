import errno
import fcntl
import json
import os
import pathlib
import resource
import stat

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from smp.checkpoint import hf_export
from smp.checkpoint.hf_export import MARKER, export_hf, refuse_foreign_files
from smp.delayed_init import build_on_meta, initialize_, materialize_
from smp.errors import RunError, UserError
from smp.models.meta_model import init_rules
from smp.models.model_config import ModelConfig, resolve_model
from smp.models.registry import build_model, family_of
from smp.pretrained import load_pretrained_
from tests.distributed import run_distributed
from tests.unit.test_pretrained import CASES, reference_model, shard, tiny_config, tokens


def load_back(directory):
    """The exported model by Hugging Face's own loader, which must find every key in its place."""
    model, info = AutoModelForCausalLM.from_pretrained(
        directory, local_files_only=True, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def assert_same_logits(directory, reference):
    with torch.no_grad():
        assert torch.equal(load_back(directory)(tokens()).logits, reference(tokens()).logits)


def export(directory, case="llama_gqa", **options):
    reference = reference_model(case)
    export_hf(reference, directory, hf_config=reference.config, **options)
    return reference


@pytest.mark.parametrize("case", CASES)
def test_hugging_face_loads_the_same_model(tmp_path, case):
    reference = export(tmp_path / "out", case, max_shard_bytes=20_000)
    assert_same_logits(tmp_path / "out", reference)
    reference.save_pretrained(tmp_path / "theirs")
    ours = {key for file in (tmp_path / "out").glob("*.safetensors") for key in load_file(file)}
    assert ours == set(load_file(tmp_path / "theirs" / "model.safetensors"))


def test_config_files(tmp_path):
    export(tmp_path / "out")
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.architectures == ["LlamaForCausalLM"] and config.dtype == torch.float32 and config.use_cache
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 2
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", MARKER
    }  # fmt: skip
    assert os.listdir(tmp_path) == ["out"]


def test_generation_has_its_cache_again(tmp_path):
    """Training builds models without one."""
    config = tiny_config("llama_gqa")
    config.use_cache = False
    model = build_model(config, attn_implementation="eager")
    export_hf(model, tmp_path / "out")
    assert AutoConfig.from_pretrained(tmp_path / "out").use_cache
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["use_cache"]
    assert not model.generation_config.use_cache  # a copy was written


def test_the_index_agrees_with_the_files(tmp_path):
    reference = export(tmp_path / "out", "gpt_neox", max_shard_bytes=20_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 3 and "embed_out.weight" in index["weight_map"]
    for file in files:
        tensors = load_file(tmp_path / "out" / file)
        assert tensors and all(index["weight_map"][key] == file for key in tensors)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 20_000
    assert index["metadata"]["total_size"] == 4 * sum(p.numel() for p in reference.parameters())


def test_dtype_and_tokenizer(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "additional_chat_templates").mkdir()
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "unrelated.txt",
        "additional_chat_templates/tool_use.jinja",
    ):
        (tmp_path / "tokenizer" / name).write_text("{}")
    for _ in range(2):  # over an earlier one, too
        export(tmp_path / "out", dtype=torch.bfloat16, tokenizer_dir=tmp_path / "tokenizer")
    assert (tmp_path / "out" / "additional_chat_templates" / "tool_use.jinja").is_file()
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert (tmp_path / "out" / "tokenizer.json").is_file() and not (tmp_path / "out" / "unrelated.txt").exists()


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_files_follow_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        export(tmp_path / "out", max_shard_bytes=20_000)
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert modes == {0o666 & ~umask}


def test_an_earlier_export_is_replaced_whole(tmp_path):
    export(tmp_path / "out", "gpt_neox", max_shard_bytes=20_000)
    reference = export(tmp_path / "out", "llama_tied")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 1
    assert_same_logits(tmp_path / "out", reference)


def test_directories_of_others_are_left_alone(tmp_path):
    export(tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"contains notes.txt, which no earlier export wrote"):
        export(tmp_path / "out", "gpt_neox")
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine" and load_back(tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        export(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    export(tmp_path / "empty")
    with pytest.raises(UserError, match="exporting the model failed"):
        export(tmp_path / "file" / "below")


@pytest.mark.parametrize("what", ["sync", "write_configs", "safetensors"])
def test_a_failure_keeps_the_earlier_export_and_leaves_nothing_behind(what, tmp_path, monkeypatch):
    reference = export(tmp_path / "out")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    before, said = resource.getrlimit(resource.RLIMIT_FSIZE), "No space left"
    if what == "safetensors":  # whose errors are its own
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
        said = r"model.safetensors cannot be written .*File too large"
    else:
        monkeypatch.setattr(hf_export, what, full)
    try:
        with pytest.raises(RunError, match=f"exporting the model failed: .*{said}"):
            export(tmp_path / "out", "gpt_neox")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_same_logits(tmp_path / "out", reference)
    assert os.listdir(tmp_path) == ["out"]


def test_what_a_killed_export_left_is_mended(tmp_path):
    reference = export(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / ".out.old")  # killed between the two renames
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "half").write_text("")
    export(tmp_path / "out")
    assert_same_logits(tmp_path / "out", reference)
    assert os.listdir(tmp_path) == ["out"]


def test_a_link_stays_and_the_directory_it_points_to_is_replaced(tmp_path):
    (tmp_path / "disk" / "out").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "out")
    for case in ("gpt_neox", "llama_gqa"):
        reference = export(tmp_path / "out", case)
        assert (tmp_path / "out").is_symlink()
        assert_same_logits(tmp_path / "disk" / "out", reference)
    assert os.listdir(tmp_path / "disk") == ["out"]


def test_a_mount_point_is_refused(tmp_path):
    (tmp_path / "link").symlink_to("/")
    for path in (pathlib.Path("/"), tmp_path / "link"):
        with pytest.raises(UserError, match="is a mount point and must be a directory in one: give /"):
            refuse_foreign_files(path)


def test_a_second_export_to_a_directory_is_refused_and_the_first_is_whole(tmp_path, monkeypatch):
    write = hf_export._write_tensors

    def another(path, tensors):
        if path.name.startswith("model-00002"):
            with pytest.raises(UserError, match=rf"out is in use by process {os.getpid()} .* give another directory"):
                export(tmp_path / "out", "gpt_neox")
        write(path, tensors)

    monkeypatch.setattr(hf_export, "_write_tensors", another)
    reference = export(tmp_path / "out", max_shard_bytes=20_000)
    assert_same_logits(tmp_path / "out", reference)
    assert os.listdir(tmp_path) == ["out"]


def test_an_export_goes_on_where_there_are_no_locks(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", none)
    assert_same_logits(tmp_path / "out", export(tmp_path / "out"))
    assert os.listdir(tmp_path) == ["out"]


def test_progress_is_told_before_each_parameter_and_each_file(tmp_path):
    calls: list[None] = []
    reference = export(tmp_path / "out", max_shard_bytes=20_000, progress=lambda: calls.append(None))
    files = len(list((tmp_path / "out").glob("*.safetensors")))
    assert files > 1 and len(calls) == files + len(list(reference.parameters()))


def _export_sharded(folder, shape):
    for case in CASES:
        config = tiny_config(case)
        model = build_on_meta(lambda config=config: build_model(config, attn_implementation="sdpa"))
        shard(model, family_of(config), shape)
        materialize_(model, torch.device("cpu"))
        load_pretrained_(model, pathlib.Path(folder, case), hf_config=config)
        target = pathlib.Path(folder, "out", case)
        export_hf(model, target, hf_config=config, max_shard_bytes=20_000)
        with pytest.raises(UserError, match="is a file"):  # on every rank
            export_hf(model, pathlib.Path(folder, "file"), hf_config=config)


@pytest.mark.parametrize("shape", [(2,), pytest.param((2, 1), marks=pytest.mark.full)])
def test_two_ranks_export_what_they_loaded(tmp_path, shape):
    (tmp_path / "file").write_text("")
    for case in CASES:
        reference_model(case).save_pretrained(tmp_path / case)
    run_distributed(_export_sharded, str(tmp_path), shape, world_size=2)
    for case in CASES:
        assert_same_logits(tmp_path / "out" / case, reference_model(case))


def test_blocks_that_torch_compile_returned_are_filled_and_exported_by_the_models_own_names(tmp_path):
    reference = reference_model("llama_gqa")
    reference.save_pretrained(tmp_path / "given")
    drawn = []
    for compiled in (False, True):
        model = build_model(reference.config, attn_implementation="sdpa")
        for layer, block in enumerate(model.model.layers if compiled else ()):
            model.model.layers[layer] = torch.compile(block)
        initialize_(model, init_rules(reference.config, seed=0), seed=0)
        drawn.append([parameter.clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *drawn))
    load_pretrained_(model, tmp_path / "given", hf_config=reference.config)
    export_hf(model, tmp_path / "out")
    assert_same_logits(tmp_path / "out", reference)


def test_an_export_can_be_finetuned(tmp_path):
    reference = export(tmp_path / "out", "gpt_neox")
    resolved = resolve_model(ModelConfig(hf_pretrained_model_name_or_dir=str(tmp_path / "out")))
    model = build_model(resolved.hf_config, attn_implementation="sdpa")
    load_pretrained_(model, resolved.weights, hf_config=resolved.hf_config)
    with torch.no_grad():
        assert torch.equal(model.eval()(tokens()).logits, reference(tokens()).logits)
