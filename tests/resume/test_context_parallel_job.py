"""The job under context parallelism: the curve of one process, resumed bit for bit and at other layouts."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
import yaml
from safetensors.torch import load_file

import smp.cli
from tests.job import LLAMA, NEOX, assert_resumes, losses, read_metrics, run_job, tensors
from tests.reference import build_reference
from tests.resume.test_train import data_flags, jsonl, text  # noqa: F401

# No number of tokens that four parts divide, and heads for four ranks.
SHAPE = ["--max_context_width", 18]
CP = ["--context_parallel_degree", 2]
FULL = ["--sharding_strategy", "full_shard"]

LAYOUTS = {  # processes, flags
    "one": (1, []),
    "shards": (2, FULL),
    "cp2": (2, [*FULL, *CP]),
    "tp2": (2, [*FULL, "--tensor_parallel_degree", 2]),
    "cp4": (4, [*FULL, "--context_parallel_degree", 4, "--cp_comm_type", "p2p"]),
    "cp2 x data 2": (4, ["--shard_degree", 2, *CP, "--cp_comm_type", "all_to_all"]),
    "cp2 x tp2": (4, [*FULL, *CP, "--tensor_parallel_degree", 2]),
}


def train(run: pathlib.Path, layout: str, *words: object) -> str:
    world_size, flags = LAYOUTS[layout]
    return run_job(*words, *flags, "--output_dir", run, world_size=world_size).succeeded().output


def base(data: list[object], *words: object) -> list[object]:
    return [*LLAMA, *SHAPE, *data, "--lr", 1e-2, "--lr_decay_iters", 12, "--global_batch_size", 6, *words]


@pytest.fixture(scope="module")
def of_one(jsonl, text, tmp_path_factory):  # noqa: F811
    """The metrics of a run of one process, of 12 steps, for each kind of data."""
    found: dict[str, list[dict]] = {}

    def metrics(kind: str) -> list[dict]:
        if kind not in found:
            folder = tmp_path_factory.mktemp(kind)
            train(folder / "run", "one", *base(data_of(kind, jsonl, text, folder), "--max_steps", 12))
            found[kind] = read_metrics(folder / "run")
        return found[kind]

    return metrics


def data_of(kind: str, jsonl: pathlib.Path, text: pathlib.Path, folder: pathlib.Path) -> list[object]:  # noqa: F811
    """Rows; or documents that are kept apart wherever they are cut."""
    return [*data_flags(kind, jsonl, text, folder / "cache"), *(["--document_mask", 1] if kind == "text" else [])]


@pytest.mark.full
def test_resume_is_bit_identical(jsonl, tmp_path):  # noqa: F811
    flags = [
        *NEOX, *SHAPE, "--resid_pdrop", 0.1, *data_flags("jsonl", jsonl, None, tmp_path / "cache"), "--lr", 1e-2,
        "--lr_decay_iters", 8, "--gradient_accumulation_steps", 2, "--train_batch_size", 1, "--checkpoint_freq", 4,
        "--validation_freq", 4, "--validation_batches", 2, "--test_dir", jsonl, *FULL, *CP,
    ]  # fmt: skip
    parts = assert_resumes(tmp_path, *flags, at=4, steps=8)
    # Other hidden states are on each rank of a sequence, and so others are left out.
    draws = [value for key, value in tensors(parts, 8).items() if "rng.cpu" in key]
    assert len(draws) == 2 and not torch.equal(*draws)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("jsonl", "cp2 x tp2"),
        *(pytest.param("jsonl", name, marks=pytest.mark.slow) for name in ("cp4", "cp2 x data 2")),
        *(pytest.param("text", name, marks=pytest.mark.slow) for name in LAYOUTS if "cp" in name),
    ],
)
def test_the_curve_is_that_of_one_process(kind, layout, of_one, jsonl, text, tmp_path):  # noqa: F811
    train(tmp_path / "run", layout, *base(data_of(kind, jsonl, text, tmp_path), "--max_steps", 6))
    expected, found = of_one(kind)[:6], read_metrics(tmp_path / "run")
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in found] == pytest.approx([line[key] for line in expected], rel=1e-5)
    assert [line["tokens"] for line in found] == [line["tokens"] for line in expected]


@pytest.mark.full
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("one", "cp2"),
        ("cp2", "one"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (
                ("cp2 x data 2", "cp2 x tp2"),
                ("cp2", "shards"),
                ("shards", "cp2"),
                ("cp2", "tp2"),
                ("cp2", "cp4"),
            )
        ),
    ],
)
def test_a_checkpoint_goes_on_at_any_other_layout(before, after, of_one, jsonl, tmp_path):  # noqa: F811
    data = data_of("jsonl", jsonl, None, tmp_path)
    run, saved = tmp_path / "run", tmp_path / "saved"
    train(run, before, *base(data, "--max_steps", 6, "--save_final_model", 1, "--model_dir", saved))
    # Nothing is left to train: what was read is written.
    resume = base(data, "--save_final_model", 1, "--resume_from_checkpoint", "latest")
    train(run, after, *resume, "--max_steps", 6, "--model_dir", tmp_path / "read")
    expected, read = (load_file(folder / "model.safetensors") for folder in (saved, tmp_path / "read"))
    assert expected.keys() == read.keys() and all(torch.equal(expected[name], read[name]) for name in expected)
    train(run, after, *resume, "--max_steps", 12)
    whole = [line["loss"] for line in of_one("jsonl")]
    assert losses(run) == pytest.approx(whole, rel=1e-5) and len(losses(run)) == 12


@pytest.mark.full
def test_what_is_logged_and_saved(jsonl, tmp_path, capsys):  # noqa: F811
    """Samples and tokens count once for all ranks of a sequence; FLOPS are of a device."""
    data = data_flags("jsonl", jsonl, None, tmp_path / "cache")
    words = [*LLAMA, *SHAPE, *data, "--max_steps", 2, "--train_batch_size", 3, "--lr_decay_iters", 12]
    output = train(tmp_path / "cp2", "cp2", *words)
    train(tmp_path / "one", "one", *words)
    assert "World size = 2: dp_replicate 1 x dp_shard 2 (cp 2 inside) x tp 1 on cpu" in output
    assert "Global batch: 3 samples, 54 tokens;" in output
    one, two = (read_metrics(tmp_path / name) for name in ("one", "cp2"))
    assert [line["tokens"] for line in two] == [line["tokens"] for line in one]
    for line, devices in ((one[-1], 1), (two[-1], 2)):
        assert line["processed_tokens_per_sec"] / line["samples_per_sec"] == pytest.approx(18)
        assert line["samples_per_sec"] * line["step_time_s"] == pytest.approx(3)
        flops = line["model_tflops_per_device"] * devices / line["processed_tokens_per_sec"]
        assert flops == pytest.approx(one[0]["model_tflops_per_device"] / one[0]["processed_tokens_per_sec"])
    path = tmp_path / "cp2" / "checkpoints" / "llama_v2-2steps"
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["degrees"] == {"dp_replicate": 1, "dp_shard": 2, "cp": 2, "tp": 1, "reshard_after_forward": True}
    assert manifest["run"]["global_batch_size"] == 3 and manifest["run"]["progress"]["samples"] == 6
    assert yaml.safe_load((tmp_path / "cp2" / "config.yaml").read_text())["context_parallel_degree"] == 2
    capsys.readouterr()
    assert smp.cli.main(["inspect", str(path)]) == 0
    assert "2 (dp_replicate 1, dp_shard 2, cp 2, tp 1)" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize("masked", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_validation_and_evaluation_are_those_of_one_process(masked, text, tmp_path):  # noqa: F811
    data = [
        *data_flags("text", None, text, tmp_path / "cache"), "--test_dir", text, "--val_batch_size", 3,
        "--document_mask", masked,
    ]  # fmt: skip
    found, evaluated = {}, {}
    for name in ("one", "cp4", "cp2 x data 2"):
        run = tmp_path / name
        train(run, name, *base(data, "--max_steps", 2, "--validation_freq", 1, "--validation_batches", 4))
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        found[name] = [line["val_loss"] for line in lines if "val_loss" in line]
        words = ["--evaluate_only", 1, "--output_dir", tmp_path / "one", "--resume_from_checkpoint", "latest"]
        world_size, flags = LAYOUTS[name]
        outcome = run_job(*LLAMA, *SHAPE, *data, *words, *flags, world_size=world_size).succeeded()
        evaluated[name] = json.loads(outcome.output.splitlines()[-1])
    for name in found:
        assert len(found[name]) == 3
        # Of the same samples where a batch has as many; all of them when it is evaluated.
        if name != "cp2 x data 2":
            assert found[name] == pytest.approx(found["one"], rel=1e-5)
        assert evaluated[name]["val_loss"] == pytest.approx(evaluated["one"]["val_loss"], rel=1e-5)
        assert [evaluated[name][key] for key in ("tokens", "samples")] == [
            evaluated["one"][key] for key in ("tokens", "samples")
        ]


@pytest.mark.full
@pytest.mark.parametrize("name", ["mistral", pytest.param("gpt_neox", marks=pytest.mark.slow)])
def test_pretrained_weights_are_finetuned_and_exported(name, tmp_path):
    build_reference(name, torch.float32).save_pretrained(tmp_path / "pretrained")
    words = [
        "--hf_pretrained_model_name_or_dir", tmp_path / "pretrained", "--use_synthetic_data", 1, "--max_steps", 4,
        "--max_context_width", 13, "--global_batch_size", 4, "--lr", 1e-2, "--save_final_model", 1,
    ]  # fmt: skip
    for layout in ("one", "cp2"):
        train(tmp_path / layout, layout, *words)
    assert losses(tmp_path / "cp2") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    one, two = (load_file(tmp_path / layout / "final" / "model.safetensors") for layout in ("one", "cp2"))
    assert one.keys() == two.keys()
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=1e-3, atol=1e-4)
    configs = [(tmp_path / layout / "final" / "config.json").read_text() for layout in ("one", "cp2")]
    assert configs[0] == configs[1]
