"""Bad input end to end: one sentence that says what, got what and what to do; exit status 2; nothing touched.

Each case is a job in a forked process: a group that this one had joined would be remembered by the tests after it.
"""

from __future__ import annotations

import errno
import json
import pathlib
import re
import shutil
import sys
import types

import pytest
from transformers import MambaConfig

import smp.cli
from smp.checkpoint.disk_forecast import forecast
from smp.errors import UserError
from smp.runtime import Launch
from smp.train import __main__ as train
from smp.train.arguments import ArgumentsError, parse_args
from smp.train.checked_job import problems_of_rest
from smp.train.exit import exit_status
from tests.job import LLAMA, NEOX, run_job

SYNTHETIC = ["--use_synthetic_data", "1", "--max_steps", "1"]
ROW = json.dumps({"input_ids": [1, 2, 3]}) + "\n"
SAMPLE = pathlib.Path(__file__).parents[2] / "data" / "sample"


def snapshot(folder: pathlib.Path) -> dict[str, tuple[int, bytes]]:
    """Every file below a folder with its time and content."""
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of one step with a checkpoint, and its directory of Hugging Face weights; never changed."""
    root = tmp_path_factory.mktemp("finished")
    run_job(*LLAMA, *SYNTHETIC, "--output_dir", root / "run", "--save_final_model", 1).succeeded()
    return root / "run"


@pytest.fixture
def refused(tmp_path):
    """Run the job in a process of its own and return the problems it printed, after checking that it left nothing."""

    def run(*words: object) -> list[str]:
        place = [] if "--output_dir" in words else ["--output_dir", tmp_path / "run"]
        outcome = run_job(*words, *place, "--data_cache_dir", tmp_path / "cache")
        assert outcome.statuses == [2], outcome.output
        assert not (tmp_path / "run").exists()
        # Checkpoints that "latest" passes over are logged.
        lines = [line for line in outcome.output.strip().splitlines() if "Not resuming from" not in line]
        assert lines and all(line.startswith("error: ") for line in lines), outcome.output
        return lines

    return run


def expect(lines: list[str], *patterns: str) -> None:
    """One line for each pattern, in any order."""
    assert len(lines) == len(patterns), lines
    for pattern in patterns:
        assert any(re.search(pattern, line) for line in lines), (pattern, lines)


@pytest.mark.parametrize(("error", "sentence"), [
    (OSError(errno.EMFILE, "Too many open files"), "files open, its limit: raise it, ulimit -n 65536"),
    (RuntimeError("can't start new thread"), "no further thread can be started: raise the limit, ulimit -u or"),
])  # fmt: skip
def test_a_limit_of_the_process_is_a_sentence(error, sentence, capsys):
    def main():
        raise error

    assert exit_status(main) == 1
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1


def test_a_limit_on_the_size_of_files_is_named(monkeypatch, tmp_path):
    def too_large(_):
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr("os.fsync", too_large)
    with pytest.raises(UserError, match=r"cannot be written .*: raise the limit, ulimit -f"):
        forecast(tmp_path, 1)


def test_docstrings_are_needed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "flags", types.SimpleNamespace(optimize=2))
    assert train.main([]) == 2
    assert capsys.readouterr().err.startswith("error: -OO or PYTHONOPTIMIZE=2 removes docstrings")


SETTINGS = [
    (["--plan", 1, "--evaluate_only", 1], "--plan 1 plans a training step and --evaluate_only 1 has none: leave one"),
    (["--offload_activations", 1], "--offload_activations 1 on a CPU needs --offload_dir.*: give a directory"),
    (
        ["--offload_activations", 1, "--offload_dir", "/absent"],
        "--offload_dir /absent cannot be written .No such file or directory.: give a directory",
    ),
    (["--offload_dir", "/tmp"], "--offload_dir needs --offload_activations 1: set it, or leave the directory out"),
    (
        ["--activation_checkpointing", 0, "--activation_checkpointing_mode", "selective"],
        "--activation_checkpointing_mode selective needs --activation_checkpointing 1: set it",
    ),
    (["--activation_checkpointing_every", 0], "--activation_checkpointing_every must be at least 1, got 0"),
    (["--activation_checkpointing_mode", "some"], "--activation_checkpointing_mode takes .*selective.*got 'some'"),
    (["--z_loss", 1e-4, "--loss_chunk_tokens", 0], "--z_loss needs --loss_chunk_tokens above 0"),
    (["--z_loss", -1], "--z_loss must be at least 0, got -1"),
    (["--loss_chunk_tokens", -1], "--loss_chunk_tokens must be at least 0, got -1"),
    (["--loss_chunk_tokens", "all"], "--loss_chunk_tokens takes an integer or auto, got 'all'"),
    (["--distributed_backend", "smdp"], "--distributed_backend takes .*smddp.*got 'smdp'"),
    (["--checkpoint_type", "async"], "--checkpoint_type takes sharded, local, .*, got 'async'; did you mean"),
    (["--checkpoint_type", "local", "--num_kept_checkpoints", 1], "--num_kept_checkpoints must be at least 2 with"),
    (
        ["--checkpoint_dir", "d", "./d", "--checkpoint_freq", 1, 2, "--num_kept_checkpoints", 1, 2],
        "names a directory twice",
    ),
    (["--checkpoint_freq", "often"], "--checkpoint_freq takes one or more of an integer or auto, got 'often'"),
    (
        ["--checkpoint_dir", "nosuch://bucket/x"],
        "nosuch://bucket/x: Protocol not known: nosuch; give a local path or a URL",
    ),
    (
        ["--checkpoint_dir", "memory://bucket/x", "--checkpoint_type", "local"],
        "--checkpoint_type local .* memory://bucket/x is one directory for all ranks: use --checkpoint_type sharded",
    ),
    (["--hf_pretrained_model_name_or_dir", "s3://b/m"], "s3://b/m is a URL, and a model is read from a dir"),
    (["--model", "s3://b/m"], "--model s3://b/m is a URL"),
    (["--output_dir", "s3://b/run"], "--output_dir s3://b/run is a URL, .*give a local one, and the URL as --check"),
    (
        "--dataset_type text --training_dir data/sample --tokenizer_name_or_dir meta-llama/Llama-3.1-8B "
        "--use_synthetic_data 0".split(),
        "hubs are never asked: .*`hf download meta-llama/Llama-3.1-8B --local-dir DIR`, then give DIR",
    ),
    (
        ["--training_dir", "allenai/c4", "--use_synthetic_data", 0],
        "hubs are never asked: .*`hf download allenai/c4 --repo-type dataset --local-dir DIR`, then give DIR",
    ),
    (["--train_batch_size", 10**9], "global batch of 1000000000 samples is too large: use at most 16777216"),
    (["--resume_from_checkpoint", "/absent"], "/absent is not a complete checkpoint.*give the path .*or latest"),
    (["--output_dir", "/proc/nothing"], "--output_dir /proc/nothing cannot be written .*choose another directory"),
    (["--checkpoint_dir", "/proc/nothing"], "--checkpoint_dir /proc/nothing cannot be written .*choose another"),
    (["--output_dir", "/tmp/" + "d" * 300], "d cannot be written .File name too long.: choose another directory"),
    (["--tensorboard_dir", "/proc/nothing"], "--tensorboard_dir /proc/nothing cannot be written .*choose another"),
    (
        ["--dtype", "bf16"],
        "--dtype is of the final model's files and needs --save_final_model 1: .*--bf16 1 computes in",
    ),
    (
        ["--dtype", "bfloat16", "--save_final_model", 1],
        "--dtype bfloat16 is not available: it is the dtype of the final model's .*--bf16 1 comput",
    ),
    (["--model_dir", "m"], "--model_dir needs --save_final_model 1: set it, or leave the directory out"),
    (["--model_dir", "/proc/a/b", "--save_final_model", 1], "--model_dir /proc/a cannot be written .*choose another"),
]


@pytest.mark.parametrize(("words", "pattern"), SETTINGS, ids=[" ".join(map(str, words)) for words, _ in SETTINGS])
def test_settings(words, pattern, refused):
    expect(refused(*LLAMA, *SYNTHETIC, *words), pattern)


WIDE = ["--hidden_width", 48, "--num_heads", 12, "--num_key_value_heads", 4]

# Twelve ranks have heads, but parts of six rows of the vocabulary end at the eleventh.
TENSOR = [  # processes, degree, settings, what is said
    (4, 0, [], ["--tensor_parallel_degree must be at least 1, got 0"]),
    (3, 3, [], ["--tensor_parallel_degree 3 does not divide the 4 attention heads: choose one of 1, 2, 4$"]),
    (8, 8, ["--model_type", "gpt_neox"], ["degree 8 does not divide the 4 attention heads: choose one of 1, 2, 4$"]),
    (6, 6, WIDE, ["degree 6 neither divides the 4 key/value heads nor is a multiple.*: choose one of 1, 2, 4$"]),
    (4, 4, ["--vocab_size", 5], ["degree 4 leaves a rank without any of the vocabulary's 5 rows: choose one of 1, 2$"]),
    (4, 4, ["--llama_intermediate_size", 3], ["leaves a rank without any of the MLP's 3 rows: choose one of 1, 2$"]),
    (
        6, 2, ["--vocab_size", 65, "--sharding_strategy", "full_shard"],
        ["degree 2 does not divide the vocabulary's 65 rows, and --hybrid_shard_degree 3 does not divide the hidden "
         "width 32, .*: choose one of 1$"],
    ),
    (
        8, 8, ["--vocab_size", 5],
        ["degree 8 does not divide the 4 .*: choose one of 1, 2$", "degree 8 leaves a rank without .* 5 rows"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("processes", "degree", "words", "patterns"), TENSOR)
def test_tensor_parallel_degrees(processes, degree, words, patterns, refused):
    # The same checks as the job's own, for as many processes as one likes.
    planned = ["--dry_run", 1, "--dry_run_world_size", processes, "--tensor_parallel_degree", degree]
    model = [] if "--model_type" in words else LLAMA
    model = model or [word for word in NEOX if word not in ("--model_type", "gpt_neox")]
    expect(refused(*model, *SYNTHETIC, *planned, *words), *patterns)


SPLIT = ["--context_parallel_degree", 2]

CONTEXT = [  # processes, settings, what is said
    (4, [*SPLIT, "--attn_implementation", "eager"],
     "--attn_implementation eager would have no effect: under --context_parallel_degree 2 .*: leave it out$"),
    (4, ["--context_parallel_degree", 0], "--context_parallel_degree must be at least 1, got 0"),
    (4, ["--context_parallel_degree", 3], "degree 3 does not divide the sharding degree of 4, .* from 1, 2, 4$"),
    (4, [*SPLIT, "--attn_pdrop", 0.2],
     r"degree 2: attention dropout is 0.2, .*\(--attn_pdrop 0 leaves it out\): use --context_parallel_degree 1$"),
    (4, [*SPLIT, "--compile", 1], "degree 2: the collectives of attention cannot be compiled: leave --compile 1 out$"),
    (4, [*SPLIT, "--attn_implementation", "sdpa"], "--attn_implementation sdpa would have no effect: .*: leave it"),
    (4, [*SPLIT, "--cp_comm_type", "ring"], "--cp_comm_type takes auto, p2p, all_gather, all_to_all, got 'ring'"),
    (8, ["--context_parallel_degree", 8, "--cp_comm_type", "all_to_all"],
     "--cp_comm_type all_to_all gives each of the 8 ranks as many heads, .* has 4: use all_gather or p2p"),
    (4, [*SPLIT, "--tensor_parallel_degree", 2, "--num_heads", 2, "--cp_comm_type", "all_to_all"],
     "each of the 2 ranks as many heads, and a tensor-parallel rank has 1: use all_gather or p2p"),
]  # fmt: skip


CASES = [case if i < 2 else pytest.param(*case, marks=pytest.mark.full) for i, case in enumerate(CONTEXT)]


@pytest.mark.parametrize(("processes", "words", "pattern"), CASES, ids=str)
def test_sequences_split_over_ranks(processes, words, pattern, refused):
    expect(refused(*LLAMA, *SYNTHETIC, "--dry_run", 1, "--dry_run_world_size", processes, *words), pattern)


def test_padding_on_the_left_late_in_the_data_of_split_sequences(refused, tmp_path):
    """Before the first step, not at the row's."""
    rows = [{"input_ids": [1, 2, 3]}] * 10 + [{"input_ids": [1, 2, 3], "attention_mask": [0, 1, 1]}]
    (tmp_path / "late.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = *LLAMA, *SPLIT, "--training_dir", tmp_path / "late.jsonl", "--dry_run", 1, "--dry_run_world_size", 2
    pattern = (
        r"late.jsonl, row 11: attention_mask hides a token before one that it shows, and --context_parallel_degree 2 "
        r"takes padding on the right alone: pad there .*, or set --document_mask 1$"
    )
    expect(refused(*words, "--max_steps", 1), pattern)


@pytest.mark.full
def test_a_job_refuses_a_model_whose_sequences_cannot_be_split(refused, tmp_path):
    MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=96, state_size=4).save_pretrained(tmp_path / "model")
    words = ["--model", tmp_path / "model", *SYNTHETIC, "--dry_run", 1, "--dry_run_world_size", 4, *SPLIT]
    expect(refused(*words), "--context_parallel_degree 2: its blocks are not given the keywords .*degree 1$")


@pytest.mark.full
@pytest.mark.parametrize("evaluates", [False, True])
def test_padding_on_the_left_under_context_parallelism(evaluates, tmp_path):
    """Found before the first step: all ranks end, with one sentence."""
    rows = [{"input_ids": [*range(1, 9)], "attention_mask": [1] * 8}] * 6
    rows.append({"input_ids": [*range(8)], "attention_mask": [0, 0, *[1] * 6]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [*LLAMA, "--max_context_width", 8, "--shuffle_data", 0, "--train_batch_size", 1, "--val_batch_size", 1]
    words += ["--max_steps", 7, *SPLIT, "--shard_degree", 2, "--data_cache_dir", tmp_path / "cache"]
    words += ["--evaluate_only", 1, "--test_dir", tmp_path] if evaluates else ["--training_dir", tmp_path]
    outcome = run_job(*words, "--output_dir", tmp_path / "run", world_size=4)
    sentence = r"row 7: attention_mask hides .*, and --context_parallel_degree 2 takes padding on the right alone"
    assert len(re.findall(sentence, outcome.output)) == 1 and "Traceback" not in outcome.output, outcome.output
    assert set(outcome.statuses) == {2}, outcome
    run_job(*words, "--document_mask", 1, "--tokenizer_name_or_dir", SAMPLE / "tokenizer", "--vocab_size", 2048,
            "--output_dir", tmp_path / "other", world_size=4).succeeded()  # fmt: skip


@pytest.mark.parametrize("content", [None, b"- lr", b"lr: 1\n\tb: 2", b"lr: 1\nlr: 2", b"\x80\x00"])
def test_a_file_of_settings_that_cannot_be_read_is_all_that_is_said(content, tmp_path):
    if content is not None:
        (tmp_path / "run.yaml").write_bytes(content)
    with pytest.raises(ArgumentsError) as caught:  # --reset_progress needs another flag, which may be in the file
        parse_args(["--config", str(tmp_path / "run.yaml"), "--reset_progress", "1", "--lrr", "1"])
    found = [*caught.value.problems, *problems_of_rest(caught.value, Launch())]
    expect(found, "^--config .*run.yaml", "^unknown flag --lrr")


def test_adapters_of_no_layer_are_refused_with_the_rest(refused):
    words = [*LLAMA, *SYNTHETIC, "--lora_rank", 2, "--lora_target_modules", "nope", "--train_batch_size", 0]
    expect(refused(*words), "--train_batch_size must be", "--lora_target_modules nope is the end of no linear layer")


def test_an_output_directory_below_a_file(refused, tmp_path):
    (tmp_path / "file").write_text("mine")
    expect(refused(*LLAMA, *SYNTHETIC, "--output_dir", tmp_path / "file" / "run"), "cannot be written .*choose another")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_bad_line_of_the_data(refused, tmp_path):
    (tmp_path / "a.jsonl").write_text(ROW + "{oops\n")
    expect(refused(*LLAMA, "--max_steps", 1, "--training_dir", tmp_path), "a.jsonl, line 2: not valid JSON")


def test_each_flag_of_one_folder_is_named(refused, tmp_path):
    (tmp_path / "a.jsonl").write_text(ROW)
    words = ["--validation_freq", 1, "--training_dir", tmp_path, "--test_dir", tmp_path]
    zipped = ".*none is .gz and --zipped_data is 1"
    expect(refused(*LLAMA, *words, "--zipped_data", 1), f"--training_dir: {zipped}", f"--test_dir: {zipped}")
    hf = "with --dataset_type hf: no data files in .*looked for \\*.parquet"
    expect(refused(*LLAMA, *words, "--dataset_type", "hf"), f"--training_dir {hf}", f"--test_dir {hf}")


def test_a_dry_run_of_a_checkpoint_that_is_not_there(refused, tmp_path):
    words = [*LLAMA, *SYNTHETIC, "--dry_run", 1, "--resume_from_checkpoint"]
    expect(refused(*words, tmp_path), "is not a complete checkpoint")


def test_no_data_and_no_validation_data(refused):
    lines = refused(*LLAMA, "--validation_freq", 5)
    expect(lines, "no training data: set --training_dir or --data", "--validation_freq 5 needs .*set --test_dir")


@pytest.mark.full
def test_evaluation(refused, finished, tmp_path):
    expect(refused(*LLAMA, "--evaluate_only", 1), "--evaluate_only 1 needs validation data: set --test_dir")
    (tmp_path / "test.jsonl").write_text(ROW)
    words = [*LLAMA, "--evaluate_only", 1, "--test_dir", tmp_path, "--resume_from_checkpoint"]
    expect(refused(*words, "latest"), "no checkpoint of llama_v2 in .*run/checkpoints: name the run by --output_dir")
    expect(refused(*words, tmp_path), "is not a complete checkpoint")
    other = [*NEOX, *words[len(LLAMA) :], finished / "checkpoints" / "llama_v2-1steps"]
    expect(refused(*other), "is of another model: .*model_type llama there, gpt_neox here")
    (tmp_path / "test.jsonl").write_text(json.dumps({"input_ids": [1]}) + "\n")
    expect(refused(*words[:-1]), "contains no token that follows another: nothing to evaluate on")


DAMAGE = {
    "tensors": ("*.safetensors", "is damaged: .*safetensors has [0-9]+ bytes instead of [0-9]+"),
    "manifest": ("manifest.json", "manifest.json does not match its own checksum"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_checkpoint(kind, finished, refused, tmp_path):
    shutil.copytree(finished, tmp_path / "copy")
    path = tmp_path / "copy" / "checkpoints" / "llama_v2-1steps"
    name, pattern = DAMAGE[kind]
    (file,) = path.glob(name)
    file.write_bytes(file.read_bytes()[:-100])
    before = snapshot(tmp_path / "copy")
    words = ["--output_dir", tmp_path / "copy", "--resume_from_checkpoint"]
    expect(refused(*LLAMA, *SYNTHETIC, *words, path), f"{pattern}; resume from another one")
    expect(refused(*LLAMA, *SYNTHETIC, *words, "latest"), "none of the 1 checkpoints in .* is valid: run `smp verify")
    assert snapshot(tmp_path / "copy") == before


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        ([], "already contains checkpoints up to step 1: continue .*latest, or .*another --output_dir"),
        (
            ["--checkpoint_dir", "ELSEWHERE"],
            "metrics.jsonl already contains the metrics of a run, up to step 1: .*another --output_dir",
        ),
        (  # a forgotten --checkpoint_dir, or a disk that is not there
            ["--checkpoint_dir", "ELSEWHERE", "--resume_from_checkpoint", "latest"],
            "metrics of a run, up to step 1: .* --checkpoint_dir .*run/checkpoints, where its checkpoints were",
        ),
    ],
)
def test_an_existing_run_is_left_alone(words, pattern, finished, refused, tmp_path):
    before = snapshot(finished)
    words = [tmp_path / "elsewhere" if word == "ELSEWHERE" else word for word in words]
    lines = refused(*LLAMA, *SYNTHETIC, "--output_dir", finished, *words)
    expect(lines, pattern)
    assert snapshot(finished) == before


# Twelve heads, and three of keys and values.
WIDER = ["--hidden_width", 48, "--num_heads", 12, "--num_key_value_heads", 3]
SEVERAL = [
    (2, ["--max_stps", 3], "unknown flag --max_stps: did you mean max_steps"),
    (2, ["--global_batch_size", 1], "--global_batch_size 1 is smaller than the 2 data-parallel .*at least 2, or fewer"),
    (4, [*WIDER, "--tensor_parallel_degree", 4], "degree 4 neither divides the 3 key/value heads nor .* of 1, 3, 6$"),
]


@pytest.mark.parametrize(("processes", "words", "pattern"), SEVERAL)
def test_several_processes_say_it_once_and_write_nothing(processes, words, pattern, tmp_path):
    outcome = run_job(*LLAMA, *SYNTHETIC, "--output_dir", tmp_path / "run", *words, world_size=processes)
    assert outcome.statuses == [2] * processes and "Traceback" not in outcome.output, outcome.output
    expect(outcome.output.strip().splitlines(), pattern)
    assert not list((tmp_path / "run").rglob("*"))


def test_a_model_that_is_too_large_is_refused_before_anything_is_allocated(tmp_path):
    words = ["--model", "llama70b", *SYNTHETIC, "--output_dir", tmp_path / "run"]
    # The limit keeps a host with terabytes of memory from accepting the job.
    outcome = run_job(*words, world_size=2, data_limit=256 * 2**30)
    assert outcome.statuses == [2, 2]
    sentence = (
        r"error: llama70b on 2 process\(es\) needs about [0-9.]+ GiB in each process and there are [0-9.]+ GiB for "
        r"each: use .*`smp plan .*` shows how many GPUs suffice, and how"
    )
    expect(outcome.output.strip().splitlines(), sentence)
    assert not (tmp_path / "run" / "checkpoints").exists()
    needs = float(re.search(r"about ([0-9.]+) GiB", outcome.output)[1])
    assert needs > 4 * 4 * 69e9 / 2 / 2**30  # fp32 parameters, gradients and two moments over two processes


@pytest.mark.parametrize("words", [["--model", "llama70b"], ["--model", "llama70b", *SYNTHETIC]])
@pytest.mark.slow
def test_a_large_model_names_a_plan_that_works(words, refused, capsys, monkeypatch):
    monkeypatch.setattr("smp.train.checked_job.available_memory", lambda device, processes: 16 << 30)
    lines = refused(*words)
    assert len(lines) == 1 + (len(words) == 2) and ("no training data" in lines[0]) == (len(words) == 2)
    command = re.search("`smp (plan .*)`", lines[-1])[1].split()
    assert smp.cli.main([*command, "--search", "0", "--sharding_strategy", "full_shard"]) == 1
    nodes = re.search("would suffice: (--nodes [0-9]+)", capsys.readouterr().out)[1].split()
    assert smp.cli.main([*command, *nodes, "--search", "0", "--sharding_strategy", "full_shard"]) == 0
    assert "llama70b" in capsys.readouterr().out
