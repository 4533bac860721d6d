"""Nothing that is read is replaced, and of an earlier export nothing that has changed since."""

from __future__ import annotations

import json
import os
import pathlib

import pytest
import torch
from transformers import AutoModelForCausalLM

import smp.cli
from smp.checkpoint import outputs
from smp.checkpoint.hf_export import export_hf
from smp.checkpoint.model_store import refuse_foreign_objects, upload_model
from smp.checkpoint.object_store import ObjectStore
from smp.checkpoint.outputs import MARKER, marker_of, marker_text, refuse_foreign_files, refuse_inputs
from smp.errors import ConfigError, UserError
from smp.train.arguments import parse_args
from smp.train.output_paths import check_output
from tests.unit.test_pretrained import reference_model


@pytest.fixture
def base(tmp_path):
    """An export of smp, as a run's final model is."""
    export_hf(reference_model("llama_gqa"), tmp_path / "runs" / "demo" / "final")
    return tmp_path / "runs" / "demo" / "final"


def train_on(directory):
    """Change weights as a program does that trains on an export and saves it there, in files of the same size."""
    file = directory / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-2000:] = os.urandom(2000)
    file.write_bytes(content)


def test_an_output_that_is_or_contains_an_input_is_refused(base, tmp_path):
    runs = base.parent.parent
    (tmp_path / "link").symlink_to(base)
    (tmp_path / "farm").mkdir()
    (tmp_path / "farm" / "model.safetensors").symlink_to(base / "model.safetensors")
    kept = base.with_name(".new.old")  # of an export that was killed
    kept.mkdir()
    for output, read in (
        (base, base), (tmp_path / "link", base), (base, tmp_path / "link"), (base, base / ".." / "final"),
        (base, base / "model.safetensors"), (tmp_path / "farm", tmp_path / "farm" / "model.safetensors"),
        (runs, base), (base, tmp_path / "farm"), (base.with_name("new"), kept),
    ):  # fmt: skip
        with pytest.raises(UserError, match=r"would be replaced, and --base reads .*: give another directory"):
            refuse_inputs(output, {"--base": read})
    for output, read in ((base / "new", base), (base, runs), (base.with_name("other"), base), (base, tmp_path / "no")):
        refuse_inputs(output, {"--base": read, "--adapter_path": None})


def test_an_export_that_has_changed_since_is_kept(base, tmp_path):
    refuse_foreign_files(base)
    url = f"file://{tmp_path}/store"
    upload_model(base, url)
    refuse_foreign_objects(url)
    upload_model(base, url)
    for directory, check, where in (
        (base, refuse_foreign_files, base),
        (tmp_path / "store", refuse_foreign_objects, url),
    ):
        train_on(directory)
        with pytest.raises(
            UserError, match=r"contains model.safetensors, which has changed since it was exported, and"
        ):
            check(where)
    with pytest.raises(UserError, match="has changed since"):
        upload_model(base, url)
    marker = base / MARKER
    marker.write_text(json.dumps({"files": list(json.loads(marker.read_text())["files"])}))  # as earlier versions
    refuse_foreign_files(base)
    os.utime(base / "model.safetensors", ns=(0, marker.stat().st_mtime_ns + 1))
    with pytest.raises(UserError, match=r"contains model.safetensors, which may have changed since an earlier version"):
        refuse_foreign_files(base)


def test_a_change_between_the_samples_of_a_large_file_is_noticed(base, monkeypatch):
    monkeypatch.setattr(outputs, "_READ_IN_FULL", 8192)
    monkeypatch.setattr(outputs, "_SAMPLE", 1)
    large = base.with_name("large")
    export_hf(reference_model("llama_gqa"), large)
    refuse_foreign_files(large)
    file = large / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(0, (large / MARKER).stat().st_mtime_ns + 1))
    with pytest.raises(UserError, match=r"contains model.safetensors, which has changed since it was exported"):
        refuse_foreign_files(large)


def test_what_makes_a_folder_a_model_is_removed_first_and_uploaded_last(base, tmp_path, monkeypatch):
    adapter, calls = tmp_path / "adapter", []
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "tokenizer.json"):
        (adapter / name).write_text("{}")
    (adapter / MARKER).write_text(marker_text(marker_of(adapter)))
    remove, upload = ObjectStore.remove, ObjectStore.upload

    def removed(store, name):
        calls.append(("remove", name))
        remove(store, name)

    def uploaded(store, file, name, advance):
        calls.append(("upload", name))
        upload(store, file, name, advance)

    monkeypatch.setattr(ObjectStore, "remove", removed)
    monkeypatch.setattr(ObjectStore, "upload", uploaded)
    for directory, last in ((base, "config.json"), (adapter, "adapter_config.json"), (base, "config.json")):
        calls.clear()
        upload_model(directory, f"file://{tmp_path}/store")
        assert calls[:2] == [("remove", "config.json"), ("remove", "adapter_config.json")]
        assert calls[-1] == ("upload", last) and (tmp_path / "store" / last).is_file()
        assert {path.name for path in (tmp_path / "store").iterdir()} == {path.name for path in directory.iterdir()}


@pytest.mark.parametrize("how", ["from_pretrained", "load_pretrained", "tokenizer"])
def test_a_script_does_not_export_over_what_it_loaded(base, how):
    before = (base / "model.safetensors").read_bytes()
    model = AutoModelForCausalLM.from_pretrained(base) if how == "from_pretrained" else reference_model("llama_gqa")
    if how == "load_pretrained":
        smp.load_pretrained(model, base)
    more = {"tokenizer_dir": base} if how == "tokenizer" else {}
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    with pytest.raises(UserError, match=rf"{base} would be replaced, and \w.* reads {base}: give another directory"):
        smp.export_hf(model, base, **more)
    assert (base / "model.safetensors").read_bytes() == before
    smp.export_hf(model, base.with_name("other"), **more)


def test_a_job_does_not_write_where_it_reads(base, tmp_path, monkeypatch):
    data = tmp_path / "data"
    data.mkdir()
    (data / "rows.jsonl").write_text('{"input_ids": [1, 2]}\n')
    (data / "config.yaml").write_text("# mine\n")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    start = ["--hf_pretrained_model_name_or_dir", base, "--save_final_model", 1, "--training_dir", data / "*.jsonl"]
    reads_base = "would be replaced, and --hf_pretrained_model_name_or_dir reads"
    reads_data = "is where --training_dir .* reads its files"
    for words, sentence in (
        (["--model_dir", base], reads_base),
        (["--model_dir", base.parent.parent], reads_base),
        (["--output_dir", base.parent], reads_base),
        (["--model_dir", f"file://{base}"], reads_base),
        (["--adapter_path", adapter, "--model_dir", adapter, "--save_merged_model", 1], "--adapter_path reads"),
        (
            ["--model_dir", tmp_path / "run"],
            "the final model would replace .*run, where --output_dir .* writes other fil",
        ),
        (["--checkpoint_dir", tmp_path / "run" / "final"], "the final model would replace .*, where --checkpoint_dir"),
        (["--output_dir", data], reads_data),
        (["--checkpoint_dir", data], reads_data),
        (["--output_dir", data], "config.yaml exists, smp did not write it, and it would be replaced"),
    ):
        config = parse_args([str(word) for word in (*start, "--output_dir", tmp_path / "run", *words)])
        with pytest.raises(ConfigError, match=sentence):
            check_output(config, pathlib.Path(config.run.output_dir))
    # Names are no paths, and a file that is read may lie beside a run's.
    tmp_path.joinpath("llama_tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    words = ["--model", "llama_tiny", "--output_dir", "llama_tiny", "--training_dir", data / "rows.jsonl"]
    check_output(parse_args([*map(str, words), "--resume_from_checkpoint", "latest"]), tmp_path / "llama_tiny")


def test_a_report_and_a_plan_replace_nothing_else(base, tmp_path, capsys):
    run, weights = base.parent, base / "model.safetensors"
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    before = weights.read_bytes()
    plan = ["plan", "--model_type", "llama_v2", "--num_layers", "1", "--device", "h100", "--json"]
    for words in (["report", str(run), "--output", str(weights)], [*plan, str(weights)]):
        assert smp.cli.main(words) == 2
        assert "exists, smp did not write it, and it would be replaced: move it away, or" in capsys.readouterr().err
    assert weights.read_bytes() == before
    for _ in range(2):
        assert smp.cli.main(["report", str(run)]) == 0
