"""Every live flag changes something: a built object, a counter, a number or a file, with a completeness test.

A check reads one thing twice, without and with the flag, and names the second reading. ``--profile_nsys`` alone is
shown by its refusal, since what it starts exists on GPUs only.
"""

from __future__ import annotations

import collections
import gc
import gzip
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import smp.memory.tracker
import tests.unit.test_choices
import tests.unit.test_flags_finetuning
import tests.unit.test_flags_model
import tests.unit.test_fp8
import tests.unit.test_plan_ledger
import tests.unit.test_trackers  # noqa: F401
import train_lib
from smp.checkpoint import saver, writer
from smp.config import Settings
from smp.errors import UserError
from smp.mesh import resolve_mesh
from smp.models.model_config import resolve_model
from smp.models.registry import build_model, family_of
from smp.parallel import context
from smp.parallel.parallelize import own_part
from smp.parallel.technique import Setup
from smp.runtime import Launch
from smp.train import garbage, trainer
from smp.train import step as one_step
from smp.train.arguments import FLAGS
from smp.train.checked_job import planned_launch
from smp.train.start import resolve
from tests.flags import CHECKS, LIVE, NO_EFFECT, ROOT, SHOWN_BY_JOBS, SYNTHETIC, Words, check, differs, parse, plan_of
from tests.job import LLAMA, read_metrics, run_job


@pytest.fixture(autouse=True)
def quick_runs(monkeypatch):
    """Leave out what only costs time here: curves, and the walk over all tensors."""
    monkeypatch.setattr("smp.train.report.write_curves", lambda run_dir: "")
    monkeypatch.setattr(smp.memory.tracker, "cpu_tensor_bytes", lambda: 0)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Data of every kind, and an nccl-tests log."""
    root = tmp_path_factory.mktemp("files")
    for folder, counts in (("train", (6, 3)), ("test", (2, 5))):
        (root / folder).mkdir()
        for part, rows in enumerate(counts):
            opener = gzip.open if part == 0 else open
            with opener(root / folder / f"{part}.jsonl{'.gz' if part == 0 else ''}", "wt") as file:
                file.writelines(json.dumps({"input_ids": [6 * part + row] * 16}) + "\n" for row in range(rows))
    (root / "text.txt").write_text("It was a bright day.\n\nThe sun stood high.\n\n" * 40)
    (root / "nccl.log").write_text("# Avg bus bandwidth    : 12.5\n")
    return SimpleNamespace(
        root=root, text=root / "text.txt", train=root / "train", test=root / "test",
        tokenizer=ROOT / "data" / "sample" / "tokenizer", nccl=root / "nccl.log",
    )  # fmt: skip


def train(words: Words, run: pathlib.Path, *, steps: int = 2) -> pathlib.Path:
    """Run the job in this process, the child of a test."""
    argv = [*LLAMA, *SYNTHETIC, "--max_steps", steps, "--output_dir", run, *words]
    assert train_lib.main([str(word) for word in argv]) == 0
    return run


def test_every_live_flag_has_a_check():
    shown = [*CHECKS]
    for file, jobs in SHOWN_BY_JOBS.items():
        text = (ROOT / "tests" / file).read_text()
        for name, flags in jobs.items():
            (lines,) = [part for part in text.split("\n\n\n") if re.search(rf"^def {name}\(", part, re.M)]
            assert [flag for flag in flags.split() if f'"--{flag}"' not in lines] == [], name
            shown += flags.split()
    assert sorted(shown) == sorted(LIVE)


@check("max_steps", "epochs", "synthetic_samples")
def test_length(tmp_path):
    steps = lambda words: resolve(plan_of(words, tmp_path), None).max_steps  # noqa: E731
    assert (steps([]), steps(["--max_steps", 3])) == (5000, 3)
    samples = ["--synthetic_samples", 8]
    assert plan_of(samples, tmp_path).train_data.samples_per_epoch == 8
    differs(steps, ["--epochs", 3], 12, samples)


@check("train_batch_size", "gradient_accumulation_steps", "global_batch_size")
def test_batch(tmp_path):
    def microbatches(words):
        step = next(iter(plan_of(words, tmp_path).train_data))
        return [len(each["input_ids"]) for each in step.microbatches]

    assert microbatches([]) == [2]
    assert microbatches(["--train_batch_size", 3]) == [3]
    assert microbatches(["--gradient_accumulation_steps", 2]) == [2, 2]
    assert len(microbatches(["--global_batch_size", 5])) == 3


@pytest.mark.full
@check("distributed_backend", "shared_buffers")
def test_exchange(tmp_path):
    def output(*words):
        job = [*LLAMA, *SYNTHETIC, "--max_steps", 1, "--sharding_strategy", "full_shard", "--comm_report", 1, *words]
        return run_job(*job, "--output_dir", tmp_path / f"run{'_'.join(map(str, words))}", world_size=2).output

    shared, private, gloo = output(), output("--shared_buffers", 0), output("--distributed_backend", "gloo")
    assert "over smddp" in shared and "shared buffer" in shared
    assert "shared memory" in private and "shared buffer" not in private
    assert "over gloo" in gloo and "shared memory" not in gloo


@check("seed")
def test_seed(tmp_path):
    losses = lambda words, run: read_metrics(train(words, tmp_path / run))[0]["loss"]  # noqa: E731
    assert losses([], "a") == losses([], "b") != losses(["--seed", 7], "c")


@check("deterministic")
def test_deterministic(tmp_path):
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    for given in (0, 1):
        train(["--deterministic", given], tmp_path / str(given))
        assert torch.are_deterministic_algorithms_enabled() == bool(given)
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if given else None)


@check("output_dir")
def test_output_dir(tmp_path):
    names = {path.name for path in train([], tmp_path / "mine").iterdir()}
    assert {"config.yaml", "metrics.jsonl", "logs", "checkpoints"} <= names and "final" not in names


@check("dry_run", "dry_run_world_size")
def test_dry_run(capsys, tmp_path):
    train(["--dry_run", 1], tmp_path / "run")
    assert "= 1 processes" in capsys.readouterr().out and not (tmp_path / "run").exists()
    train(["--dry_run", 1, "--dry_run_world_size", 16], tmp_path / "run")
    out = capsys.readouterr().out
    assert "dp_replicate 2 x dp_shard 8 x tp 1 = 16 processes" in out and "optimizer state" in out
    assert planned_launch(parse([*SYNTHETIC, "--dry_run", 1, "--dry_run_world_size", 16]), Launch()).world_size == 16


@check("profile_nsys")
def test_profile_nsys(tmp_path):
    with pytest.raises(UserError, match="--profile_nsys 1 needs a GPU and none is visible"):
        plan_of(["--profile_nsys", 1], tmp_path)


@check("grad_clip", "defer_gradient_sync", "reshard_between_microbatches", "clean_cache")
def test_handed_to_the_step(monkeypatch, tmp_path):
    seen: dict[str, list] = {"clip": [], "defer": [], "keep": [], "clean": []}
    clip, sync = one_step.clip_grad_norm_, one_step.set_gradient_sync
    monkeypatch.setattr(
        one_step, "clip_grad_norm_", lambda m, bound, **k: seen["clip"].append(bound) or clip(m, bound, **k)
    )

    def noted(model, **values):
        seen["defer"].append(values["defer"])
        seen["keep"].append(values["keep"])
        sync(model, **values)

    monkeypatch.setattr(one_step, "set_gradient_sync", noted)
    monkeypatch.setattr(trainer, "release_cache", lambda device: seen["clean"].append(1))
    train([], tmp_path / "a")
    assert seen == {"clip": [1.0, 1.0], "defer": [False, False], "keep": [False, False], "clean": []}
    for calls in seen.values():
        calls.clear()
    words = ["--grad_clip", 0.5, "--defer_gradient_sync", 1, "--reshard_between_microbatches", 0, "--clean_cache", 1]
    train(words, tmp_path / "b")
    assert seen == {"clip": [0.5, 0.5], "defer": [True, True], "keep": [True, True], "clean": [1, 1]}


@check("gc_freq")
def test_gc_freq(monkeypatch, tmp_path):
    collected = []
    monkeypatch.setattr(garbage.gc, "collect", lambda generation=2: collected.append((generation, gc.isenabled())))
    train([], tmp_path / "a")
    assert collected == []
    train(["--gc_freq", 1], tmp_path / "b")
    assert collected == [(2, True), (2, False), (2, False)] and gc.isenabled() and gc.get_freeze_count() == 0


@check("training_dir", "use_synthetic_data", "zipped_data", "dataset_type", "tokenizer_name_or_dir",
       "text_document_separator", "data_cache_dir")  # fmt: skip
def test_sources(files, tmp_path):
    def rows(words, vocab=64):
        return plan_of(["--vocab_size", vocab, *words], tmp_path, data=[]).train_data

    jsonl = ["--training_dir", files.train]
    assert rows(jsonl).samples_per_epoch == 9
    assert rows([*jsonl, "--zipped_data", 1]).samples_per_epoch == 6
    assert rows([*jsonl, "--zipped_data", 0]).samples_per_epoch == 3
    assert rows([*jsonl, "--use_synthetic_data", 1]).samples_per_epoch == 100_000
    text = ["--dataset_type", "text", "--training_dir", files.text, "--tokenizer_name_or_dir", files.tokenizer]
    whole, separated = rows(text, 2048), rows([*text, "--text_document_separator", ""], 2048)
    assert whole.samples_per_epoch > 9 and whole.fingerprint != separated.fingerprint
    assert not (tmp_path / "other").exists()
    rows([*jsonl, "--data_cache_dir", tmp_path / "other"])
    assert len(list((tmp_path / "other").glob("*/tokens.bin"))) == 2


@check("dataset_name", "dataset_config_name", "dataset_split")
def test_a_dataset_by_name(tmp_path, monkeypatch):
    import datasets

    load = datasets.load_dataset

    def found(name, config=None, **more):
        if name != "d":
            return load(name, config, **more)
        rows = {"train": 3, "test": 1} if config is None else {"train": 5}
        parts = {split: datasets.Dataset.from_dict({"input_ids": [[1]] * count}) for split, count in rows.items()}
        datasets.DatasetDict(parts).save_to_disk(str(tmp_path / name))
        return datasets.load_from_disk(str(tmp_path / name))

    monkeypatch.setattr(datasets, "load_dataset", found)
    words = ["--dataset_name", "d"]
    rows = lambda words: plan_of(words, tmp_path, data=[]).train_data.samples_per_epoch  # noqa: E731
    assert rows(words) == 3
    assert rows([*words, "--dataset_split", "test"]) == 1 and rows([*words, "--dataset_config_name", "c"]) == 5
    validated = plan_of([*words, "--validation_freq", 1], tmp_path, data=[]).validation_data
    assert validated.samples_per_epoch == 1


@check("data_num_workers", "shuffle_data", "document_mask")
def test_serving(files, tmp_path):
    data = ["--training_dir", files.train, "--tokenizer_name_or_dir", files.tokenizer]
    plan = lambda words: plan_of(words, tmp_path, data=data).train_data  # noqa: E731
    assert (plan([])._workers, plan(["--data_num_workers", 1])._workers) == (0, 1)

    def order(words):
        steps = itertools.islice(plan(words), 9)
        return [int(step.microbatches[0]["input_ids"][0, 0]) for step in steps]

    one = ["--train_batch_size", 1]
    assert order([*one, "--shuffle_data", 0]) == list(range(9)) == sorted(order(one)) != order(one)
    keys = lambda words: next(iter(plan(words))).microbatches[0].keys()  # noqa: E731
    assert keys(["--document_mask", 1]) - keys([]) == {"position_ids", "document_bounds", "longest_document"}


@check("test_dir", "validation_freq", "validation_batches", "val_batch_size", "fast_validation")
def test_validation(files, tmp_path, monkeypatch):
    data = ["--training_dir", files.train, "--validation_freq", 1, "--test_dir", files.test]
    plan = lambda words: plan_of(words, tmp_path, data=[*data, *words])  # noqa: E731
    assert plan([]).validation_data.samples_per_epoch == 5
    assert plan(["--test_dir", files.train]).validation_data.samples_per_epoch == 3
    assert plan(["--fast_validation", 0]).validation_data.samples_per_epoch == 7
    assert plan_of([], tmp_path, data=data[:2]).validation_data is None
    batch = lambda words: len(next(iter(plan(words).validation_data)).microbatches[0]["input_ids"])  # noqa: E731
    differs(batch, ["--val_batch_size", 2], 2)
    forwards: list[bool] = []
    forward = one_step.forward
    monkeypatch.setattr(one_step, "forward", lambda m, *a: forwards.append(m.training) or forward(m, *a))
    for count in (10, 3):
        train(["--validation_freq", 1, "--validation_batches", count], tmp_path / f"v{count}", steps=1)
    one = lambda count: [*[False] * count, True, *[False] * count]  # noqa: E731
    assert forwards == [*one(10), *one(3)]


@check("evaluate_only")
def test_evaluation(files, tmp_path, capsys):
    words = [*LLAMA, "--test_dir", files.test, "--output_dir", tmp_path / "run", "--data_cache_dir", tmp_path / "cache"]
    assert train_lib.main([str(word) for word in [*words, "--evaluate_only", 1]]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert json.loads(last)["samples"] == 7 and not (tmp_path / "run").exists()


@pytest.mark.full
@check("checkpoint_overhead")
def test_checkpoint_overhead(tmp_path, monkeypatch):
    monkeypatch.setattr(saver, "MEASURED_STEPS", 1)
    auto = ["--checkpoint_freq", "auto", "--num_kept_checkpoints", 9]
    rare = train([*auto, "--checkpoint_overhead", 0.0001], tmp_path / "rare", steps=3)
    often = train([*auto, "--checkpoint_overhead", 1], tmp_path / "often", steps=3)
    assert [len([*run.rglob("*steps")]) for run in (rare, often)] == [2, 3]


@pytest.mark.full
@check("read_back")
def test_read_back(tmp_path, monkeypatch):
    reads: list[pathlib.Path] = []
    digest_of = writer.digest_of
    monkeypatch.setattr(writer, "digest_of", lambda path, **how: reads.append(path) or digest_of(path, **how))
    for words in (["--read_back", "never"], []):
        train([*words, "--checkpoint_type", "async_sharded", "--checkpoint_freq", 1], tmp_path / f"run{len(words)}")
    assert len(reads) == 1  # the first of two steps; the last one is saved in the foreground
    train(["--read_back", "always"], tmp_path / "always", steps=1)
    assert len(reads) == 2


@check("comm_report")
def test_comm_report(tmp_path, capsys):
    shown = []
    for words in ([], ["--comm_report", 1]):
        train(words, tmp_path / str(len(words)), steps=1)
        shown.append("ollectives" in capsys.readouterr().out)
    assert shown == [False, True]


@pytest.mark.full
@check("logging_freq", "logging_freq_for_avg", "enable_memory_profiling", "tensorboard_dir", "nccl_test_log")
def test_logging(files, tmp_path, capsys):
    a = train([], tmp_path / "a", steps=4)
    out = capsys.readouterr().out
    assert len(read_metrics(a)) == 4 and "Running Avg" not in out and "CPU MEMORY" not in out
    words = ["--logging_freq", 2, "--logging_freq_for_avg", 2, "--enable_memory_profiling", 1,
             "--tensorboard_dir", tmp_path / "t1", tmp_path / "t2", "--nccl_test_log", files.nccl]  # fmt: skip
    b = train(words, tmp_path / "b", steps=4)
    out = capsys.readouterr().out
    assert len(read_metrics(b)) == 2 and "Running Avg" in out and "[CPU MEMORY]" in out
    for folder in (tmp_path / "t1", tmp_path / "t2"):
        assert b"NCCLTest/len" in b"".join(p.read_bytes() for p in folder.glob("events*"))
    assert not (b / "tensorboard").exists() and (a / "tensorboard").exists()


def test_a_flag_without_effect_says_so_in_the_log(tmp_path):
    value = {"data_type": "bert", "framework": "other", "fp8_amax_compute_algo": "most_recent"}
    words = [word for name in NO_EFFECT for word in (f"--{name}", value.get(name, 1))]
    outcome = run_job(*LLAMA, *SYNTHETIC, "--max_steps", 1, "--output_dir", tmp_path / "run", *words).succeeded()
    assert len(NO_EFFECT) >= 5
    for name in NO_EFFECT:
        assert f"--{name} has no effect: {FLAGS[name].field.metadata['no_effect']}" in outcome.output


@pytest.mark.full
def test_a_dry_run_plans_large_jobs_in_little_memory(tmp_path):
    code = (
        "import sys, train_lib\n"
        "for model in ('llama70b', 'gpt_neox_20b'):\n"
        "    words = ['--model', model, '--dry_run', '1', '--dry_run_world_size', '256', *sys.argv[1:]]\n"
        "    assert train_lib.main(words) == 0\n"
        "    print('NEXT')\n"
        # Not ru_maxrss, which begins with that of the process that started this one.
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    command = [sys.executable, "-c", code, *SYNTHETIC, "--output_dir", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    *reports, peak_kib = done.stdout.split("NEXT\n")
    assert len(reports) == 2
    for report in reports:
        assert "dp_replicate 32 x dp_shard 8 x tp 1 = 256 processes" in report
    assert int(peak_kib) < 1.5 * 2**20


@check("tp_overlap")
def test_tp_overlap(tmp_path):
    # Its effect: tests/parity/test_tensor_parallel_overlap.py.
    with pytest.raises(UserError, match=r"--tp_overlap 1 needs tensor-parallel ranks of one host, .*: there is no GPU"):
        plan_of(["--tp_overlap", 1], tmp_path)
    with pytest.raises(UserError, match="--tp_overlap 1 needs --sequence_parallel 1: set it, or leave"):
        plan_of(["--tp_overlap", 1, "--sequence_parallel", 0], tmp_path)
    plan_of(["--sequence_parallel", 0], tmp_path)


@pytest.mark.full
@check("tensor_parallel_degree", "sequence_parallel", "tp_save_gathered")
def test_tensor_parallelism(tmp_path):
    def calls(*words):
        job = [*LLAMA, *SYNTHETIC, "--max_steps", 1, "--activation_checkpointing", 0, "--comm_report", 1, *words]
        output = run_job(*job, "--output_dir", tmp_path / f"run{len(list(tmp_path.iterdir()))}", world_size=2).output
        found = collections.Counter()
        for operation, number in re.findall(r"^(all_gather|reduce_scatter|all_reduce) +\S+ \S+ +(\d+) ", output, re.M):
            found[operation] += int(number)
        return found

    split = ["--tensor_parallel_degree", 2]
    sequence, whole = calls(*split), calls(*split, "--sequence_parallel", 0)
    assert whole["reduce_scatter"] < sequence["reduce_scatter"] and whole["all_reduce"] > sequence["all_reduce"]
    kept = calls(*split, "--tp_save_gathered", 1)
    # Two of each block; the head's gradients are made in forward.
    assert sequence["all_gather"] - kept["all_gather"] == 2 * 2


@check("context_parallel_degree", "cp_comm_type", "cp_load_balance")
def test_context_parallelism():
    def laid_out(*words):
        config = parse([*LLAMA, *SYNTHETIC, "--sharding_strategy", "full_shard", *words])
        return config, resolve_mesh(config.parallel, world_size=4, local_world_size=4)

    def held(*words):
        """The tokens of rank 0, and the attention function of its blocks."""
        config, mesh = laid_out(*words)
        ids = torch.arange(16)[None]
        model = build_model(resolve_model(config.model).hf_config, attn_implementation="sdpa")
        setup = Setup(family_of(model.config), mesh, Settings((config.parallel,)))
        found = own_part({"input_ids": ids, "targets": ids}, setup)
        context.apply(model, setup)
        (attention,) = {block.self_attn.config._attn_implementation for block in model.model.layers}
        return found["input_ids"][0].tolist(), attention, mesh.data.size

    split = ["--context_parallel_degree", 2]
    assert held() == ([*range(16)], "sdpa", 4)
    assert held(*split) == ([0, 1, 2, 3, 12, 13, 14, 15], "smp_context_all_gather", 2)
    assert held("--context_parallel_degree", 4) == ([0, 1, 14, 15], "smp_context_all_gather", 1)
    for exchange in ("p2p", "all_gather", "all_to_all"):
        assert held(*split, "--cp_comm_type", exchange)[1] == f"smp_context_{exchange}"
    assert held(*split, "--cp_load_balance", 0)[0] == [*range(8)]
