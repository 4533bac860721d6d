import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import smp.train
from smp.checkpoint.config import CheckpointConfig
from smp.data.config import DataConfig
from smp.environment import Launch
from smp.parallel.lora import Config as LoraConfig
from smp.train import report
from smp.train.hints import next_commands, without
from smp.units import short


def results(curves=None, tensorboard=(), final=None, checkpoint=None):
    return {"curves": curves, "tensorboard": tensorboard, "final": final, "checkpoint": checkpoint}


def hints(monkeypatch, *words, processes=2, hosts=1, resumes=False, found=None, **others):
    monkeypatch.setattr(sys, "argv", [str(Path(smp.train.__file__).with_name("__main__.py")), *words])
    monkeypatch.setattr("smp.train.hints.shutil.which", lambda name: sys.executable)
    launch = Launch(0, processes, 0, processes // hosts)
    found = found or results(Path("/r/curves.png"), [Path("/r/tensorboard")], Path("/r/final"))
    return list(next_commands(launch, run_dir=Path("/r"), **found, max_steps=80, resumes=resumes, **others))


TUNED = "--hf_pretrained_model_name_or_dir /r/final --training_dir DATA --output_dir runs/finetuned"


def test_make_train_is_told_its_own_command_with_the_flags_that_were_given(monkeypatch):
    words = ("--config", "configs/demo.yaml", "--max_steps", "40", "--output_dir", "runs/a b")
    assert hints(monkeypatch, *words, processes=4, resumes=True) == [
        "curves:    /r/curves.png, or tensorboard --logdir /r/tensorboard",
        "train on:  make train NPROC=4 ARGS=\"--output_dir 'runs/a b' --max_steps 80\"",
        f"finetune:  python -m smp.launch.local --nproc_per_node 4 -m smp.train {TUNED}",
    ]


def test_other_jobs_are_told_their_own_command(monkeypatch):
    _, on, finetune = hints(monkeypatch, "--model", "llama_tiny")
    assert on == "train on:  the same command with --max_steps 80 --resume_from_checkpoint latest"
    assert finetune == f"finetune:  python -m smp.launch.local --nproc_per_node 2 -m smp.train {TUNED}"
    *_, finetune = hints(monkeypatch, "--model", "llama_tiny", processes=4, hosts=2)
    assert finetune == f"finetune:  a job like this one, {TUNED}"


def test_only_what_is_there_is_named(monkeypatch):
    (on,) = hints(monkeypatch, found=results(None, [], None))
    assert on.startswith("train on:")


def test_a_checkpoint_is_exported_where_there_is_no_final_model(monkeypatch):
    found = results(None, [], None, Path("/r/checkpoints/latest"))
    _, export = hints(monkeypatch, found=found)
    assert export == "export:    python -m smp export /r/checkpoints/latest /r/final"


@pytest.mark.parametrize("copied", [False, True])
def test_the_checkpoint_that_is_exported_is_the_last(copied, tmp_path, monkeypatch):
    (tmp_path / "m-4steps").mkdir()
    (tmp_path / "m-8steps").mkdir()
    (tmp_path / "latest").mkdir() if copied else (tmp_path / "latest").symlink_to("m-8steps")
    said = []
    monkeypatch.setattr(report, "write_curves", lambda run_dir: "not here")
    monkeypatch.setattr(report.logger, "info", lambda text, *words: said.append(text % words))
    config = SimpleNamespace(
        checkpoint=CheckpointConfig(),
        logging=SimpleNamespace(tensorboard_folders=lambda _: []),
        data=DataConfig(use_synthetic_data=True),
        lora=LoraConfig(),
    )
    plan = SimpleNamespace(
        config=config, run_dir=tmp_path, checkpoint_dirs=[tmp_path], model=SimpleNamespace(name="m"), launch=Launch()
    )
    report.log_next_commands(plan, SimpleNamespace(max_steps=8), 8, None)
    assert f"smp export {tmp_path / ('m-8steps' if copied else 'latest')} " in said[-1]
    assert "Done: step 8 of 8. What next:" in said
    report.log_next_commands(plan, SimpleNamespace(max_steps=5), 8, None)
    assert "Nothing was trained: the checkpoint is at step 8, the end at step 5. What next:" in said


def test_directories_that_are_proposed_are_new(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/finetuned").mkdir(parents=True)
    (tmp_path / "runs/finetuned2").symlink_to("nowhere")
    *_, finetune = hints(monkeypatch, "--model", "llama_tiny")
    assert finetune.endswith("--training_dir DATA --output_dir runs/finetuned3")


def test_conversations_and_adapters_are_told_their_flags(monkeypatch, tmp_path):
    *_, finetune = hints(monkeypatch, "--model", "llama_tiny", is_chat=True)
    assert "--training_dir DATA --dataset_type chat --output_dir" in finetune
    (tmp_path / "adapter_config.json").write_text("{}")
    found = results(None, [], tmp_path, Path("/r/checkpoints/latest"))
    _, merge = hints(monkeypatch, found=found, has_adapters=True)
    *_, last = hints(monkeypatch, found=results(None, [], Path("/r/final"), Path("/r/c/latest")), has_adapters=True)
    assert last.startswith("finetune:")  # the final model is the merged one
    assert merge == "merge:     python -m smp export /r/checkpoints/latest /r/merged --merge"


def test_a_python_that_is_not_on_the_path_is_named_whole(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/x/train/__main__.py"])  # of the user
    monkeypatch.setattr("smp.train.hints.shutil.which", lambda name: None)
    monkeypatch.setattr(sys, "executable", str(Path.cwd() / ".venv/bin/python"))
    found = results(None, [Path("/r/t")], Path("/r/final"))
    curves, _, finetune = next_commands(Launch(), run_dir=Path("/a b"), **found, max_steps=2, resumes=False)
    assert curves == "curves:    .venv/bin/tensorboard --logdir /r/t"
    assert finetune == f"finetune:  .venv/bin/python -m smp.launch.local --nproc_per_node 1 -m smp.train {TUNED}"


def test_paths_with_spaces_can_be_pasted(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/my x/train.py"])
    monkeypatch.setattr("smp.train.hints.shutil.which", lambda name: None)
    monkeypatch.setattr(sys, "executable", "/my x/python")
    words = []
    for found in (results(None, [Path("/a b/t")], Path("/a b/final")), results(None, [], None, Path("/a b/c/latest"))):
        lines = list(next_commands(Launch(), run_dir=Path("/a b"), **found, max_steps=2, resumes=False))
        words += [shlex.split(line.partition(":")[2]) for line in lines if not line.startswith("train on")]
    assert words == [
        ["/my x/tensorboard", "--logdir", "/a b/t"],
        [
            "/my x/python",
            *"-m smp.launch.local --nproc_per_node 1 -m smp.train".split(),
            *shlex.split(TUNED.replace("/r/final", "'/a b/final'")),
        ],
        ["/my x/python", "-m", "smp", "export", "/a b/c/latest", "/a b/final"],
    ]


def test_a_flag_is_left_out_in_both_forms():
    assert without(["--a", "1", "--max_steps", "2", "--b", "--max_steps=3", "c"], "--max_steps") == [
        "--a",
        "1",
        "--b",
        "c",
    ]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (950, "950"),
        (2_077_920, "2.08 M"),
        (999_600, "1 M"),
        (468_224, "468 K"),
        (6_738_415_616, "6.74 B"),
        (3.2e12, "3.2 T"),
    ],
)
def test_counts_have_three_digits(count, text):
    assert short(count) == text
