"""Every live flag changes something: a built object, a counter, a number or a file, with a completeness test.

A check reads one thing twice, without and with the flag, and names the second reading. ``--profile_nsys`` alone is
shown by its refusal, since what it starts exists on GPUs only.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

import smp.transform
import train_lib
from arguments import FLAGS, parse_args
from job import make_plan, planned_launch
from smp.checkpoint.hf_export import export_hf
from smp.errors import UserError
from smp.lr_schedule import lr_at
from smp.mesh import build_mesh, resolve_degrees
from smp.models.model_config import resolve_model
from smp.models.registry import build_model
from smp.optimizer import build_optimizer
from smp.runtime import Launch, process_group
from smp.transform import prepare_model
from tests.job import LLAMA, NEOX, read_metrics, run_job

ROOT = pathlib.Path(__file__).parent.parent
SYNTHETIC = ["--use_synthetic_data", "1"]
MISTRAL = "--model_type mistral --hidden_width 32 --num_layers 2 --num_heads 4 --intermediate_size 48".split()
LLAMA3 = [*LLAMA, "--rope_scaling_type", "llama3"]
Words = list[object]
Probe = Callable[[Words], Any]
CHECKS: dict[str, Callable[..., None]] = {}

LIVE = [
    name
    for name, flag in FLAGS.items()
    if name == flag.field.name and not flag.field.metadata["only"] and not flag.field.metadata["no_effect"]
]
NO_EFFECT = [name for name, flag in FLAGS.items() if flag.field.metadata["no_effect"] and name == flag.field.name]


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    logger = logging.getLogger("smp")
    handlers, propagate, level = list(logger.handlers), logger.propagate, logger.level
    yield
    for handler in set(logger.handlers) - set(handlers):
        handler.close()
    logger.handlers, logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Data of every kind, a model directory, and an nccl-tests log."""
    root = tmp_path_factory.mktemp("files")
    for folder, counts in (("train", (6, 3)), ("test", (2, 5))):
        (root / folder).mkdir()
        for part, rows in enumerate(counts):
            line = json.dumps({"input_ids": list(range(1, 17))}) + "\n"
            opener = gzip.open if part == 0 else open
            with opener(root / folder / f"{part}.jsonl{'.gz' if part == 0 else ''}", "wt") as file:
                file.write(line * rows)
    (root / "text.txt").write_text("It was a bright day.\n\nThe sun stood high.\n\n" * 40)
    (root / "nccl.log").write_text("# Avg bus bandwidth    : 12.5\n")
    resolved = resolve_model(parse_args([*LLAMA, *SYNTHETIC]).model)
    model = build_model(resolved.hf_config, attn_implementation="sdpa")
    export_hf(model, root / "model", hf_config=resolved.hf_config)
    return SimpleNamespace(
        root=root, model=root / "model", text=root / "text.txt", train=root / "train", test=root / "test",
        tokenizer=ROOT / "data" / "sample" / "tokenizer", nccl=root / "nccl.log",
    )  # fmt: skip


def parse(words: Words):
    return parse_args([str(word) for word in words])


def plan_of(words: Words, tmp: pathlib.Path, *, model: Words = LLAMA, data: Words = SYNTHETIC):
    return make_plan(
        parse([*model, *data, "--output_dir", tmp / "run", "--data_cache_dir", tmp / "cache", *words]), Launch()
    )


def hf(words: Words, *, model: Words = LLAMA):
    return resolve_model(parse([*model, *SYNTHETIC, *words]).model).hf_config


@contextlib.contextmanager
def one_process(words: Words) -> Iterator[Any]:
    """The sharded model of a run of one process, and its configuration."""
    config = parse([*LLAMA, *SYNTHETIC, *words])
    device = torch.device("cpu")
    with process_group(config.comm, Launch(), device):
        degrees = resolve_degrees(config.parallel, world_size=1, local_world_size=1)
        mesh = build_mesh(degrees, "cpu")
        resolved = resolve_model(config.model)
        model = prepare_model(
            resolved, mesh=mesh, parallel=config.parallel, activation=config.activation, dtype=torch.float32,
            device=device, seed=config.run.seed, load_weights=True,
        )  # fmt: skip
        yield SimpleNamespace(model=model, config=config)


def blocks(words: Words) -> list[Any]:
    with one_process(words) as built:
        return list(built.model.model.layers)


def prefetched(words: Words, which: str) -> int:
    with one_process(words) as built:
        units = [module for module in built.model.modules() if isinstance(module, FSDPModule)]
        return sum(len(getattr(unit._get_fsdp_state(), which)) for unit in units)


def train(words: Words, run: pathlib.Path, *, steps: int = 2) -> pathlib.Path:
    """Run the job in this process."""
    argv = [*LLAMA, *SYNTHETIC, "--max_steps", steps, "--output_dir", run, *words]
    assert train_lib.main([str(word) for word in argv]) == 0
    return run


def differs(reading: Callable[[Words], Any], given: Words, expected: Any, base: Words = ()) -> None:  # type: ignore[assignment]
    """The reading with ``base`` alone is another than with ``given`` added, which is the expected one."""
    before, after = reading([*base]), reading([*base, *given])
    assert after == expected and before != expected, (before, after)


def check(*flags: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a test as the one that shows these flags."""

    def register(test: Callable[..., None]) -> Callable[..., None]:
        for flag in flags:
            assert flag not in CHECKS, flag
            CHECKS[flag] = test
        return test

    return register


def test_every_live_flag_has_a_check():
    assert sorted(set(LIVE) - set(CHECKS)) == []
    assert sorted(set(CHECKS) - set(LIVE)) == []


# flag -> (words, reading of the resolved config, expected, base). The built model reads the config: test_models.py.
SHAPES: dict[str, tuple[Words, Callable[[Any], Any], Any, Words]] = {
    "vocab_size": ([99], lambda c: c.vocab_size, 99, LLAMA),
    "hidden_width": ([64], lambda c: c.hidden_size, 64, LLAMA),
    "num_layers": ([3], lambda c: c.num_hidden_layers, 3, LLAMA),
    "num_heads": ([2], lambda c: c.num_attention_heads, 2, LLAMA),
    "num_key_value_heads": ([1], lambda c: c.num_key_value_heads, 1, LLAMA),
    "llama_intermediate_size": ([50], lambda c: c.intermediate_size, 50, LLAMA),
    "intermediate_size": ([50], lambda c: c.intermediate_size, 50, NEOX),
    "resid_pdrop": ([0.3], lambda c: c.hidden_dropout, 0.3, NEOX),
    "attn_pdrop": ([0.3], lambda c: c.attention_dropout, 0.3, LLAMA),
    "initializer_range": ([0.5], lambda c: c.initializer_range, 0.5, LLAMA),
    "tie_word_embeddings": ([1], lambda c: c.tie_word_embeddings, True, LLAMA),
    "rotary_pct": ([0.5], lambda c: c.rope_parameters["partial_rotary_factor"], 0.5, NEOX),
    "rotary_emb_base": ([500], lambda c: c.rope_parameters["rope_theta"], 500, LLAMA),
    "rope_scaling_type": (["llama3"], lambda c: c.rope_parameters["rope_type"], "llama3", LLAMA),
    "rope_scaling_factor": ([4], lambda c: c.rope_parameters["factor"], 4, LLAMA3),
    "rope_scaling_high_freq_factor": ([5], lambda c: c.rope_parameters["high_freq_factor"], 5, LLAMA3),
    "rope_scaling_low_freq_factor": ([2], lambda c: c.rope_parameters["low_freq_factor"], 2, LLAMA3),
    "rope_scaling_original_max_position_embeddings": (
        [8], lambda c: c.rope_parameters["original_max_position_embeddings"], 8, LLAMA3,
    ),
    "sliding_window": ([7], lambda c: c.sliding_window, 7, MISTRAL),
    "max_context_width": ([24], lambda c: c.max_position_embeddings, 24, LLAMA),
}  # fmt: skip


@pytest.mark.parametrize("flag", SHAPES)
@check(*SHAPES)
def test_shape(flag):
    words, reading, expected, base = SHAPES[flag]
    differs(lambda given: reading(hf(given, model=base)), [f"--{flag}", *words], expected)


@check("model")
def test_model():
    name = lambda words: resolve_model(parse([*SYNTHETIC, *words]).model).name  # noqa: E731
    differs(name, ["--model", "llama7b"], "llama7b")


@check("attn_implementation")
def test_attn_implementation():
    def used(words):
        with one_process(words) as built:
            return built.model.config._attn_implementation

    differs(used, ["--attn_implementation", "eager"], "eager")


@check("delayed_param")
def test_delayed_param(monkeypatch):
    calls = []
    original = smp.transform.build_on_meta
    monkeypatch.setattr(smp.transform, "build_on_meta", lambda build: calls.append(1) or original(build))
    blocks([])
    assert len(calls) == 1
    blocks(["--delayed_param", 0])
    assert len(calls) == 1


@check("finetune", "pretrained_checkpoint_file", "pretrained_model_name", "finetune_checkpoint_load_dir",
       "hf_pretrained_model_name_or_dir")  # fmt: skip
def test_pretrained_weights(files):
    def embedding(words):
        config = parse([*SYNTHETIC, *words])
        resolved = resolve_model(config.model)
        with process_group(config.comm, Launch(), torch.device("cpu")):
            mesh = build_mesh(resolve_degrees(config.parallel, world_size=1, local_world_size=1), "cpu")
            model = prepare_model(
                resolved, mesh=mesh, parallel=config.parallel, activation=config.activation, dtype=torch.float32,
                device=torch.device("cpu"), seed=1, load_weights=True,
            )  # fmt: skip
            return model.model.embed_tokens.weight.full_tensor().sum().item()

    named = ["--finetune", 1, "--pretrained_model_name", files.model, "--finetune_checkpoint_load_dir", files.model]
    file = ["--finetune", 1, "--pretrained_checkpoint_file", files.model / "model.safetensors"]
    whole = embedding(["--hf_pretrained_model_name_or_dir", files.model])
    assert embedding(named) == embedding(file) == whole
    assert embedding(["--model", files.model]) != whole
    with pytest.raises(UserError, match="--pretrained_checkpoint_file is for finetuning: add --finetune 1"):
        parse([*SYNTHETIC, "--pretrained_checkpoint_file", files.model])


@check("sharding_strategy", "hybrid_shard_degree")
def test_sharding():
    def degrees(words):
        found = resolve_degrees(parse([*SYNTHETIC, *words]).parallel, world_size=8, local_world_size=4)
        return found.dp_replicate, found.dp_shard

    differs(degrees, ["--sharding_strategy", "full_shard"], (1, 8))
    differs(degrees, ["--hybrid_shard_degree", 2], (4, 2))


@check("forward_prefetch", "backward_fetch_policy")
def test_prefetch():
    forward = lambda words: prefetched(words, "_states_to_forward_prefetch")  # noqa: E731
    backward = lambda words: prefetched(words, "_states_to_backward_prefetch")  # noqa: E731
    differs(forward, ["--forward_prefetch", 0], 0)
    differs(backward, ["--backward_fetch_policy", "backward_post"], 4)


@check("auto_wrap_policy")
def test_auto_wrap_policy():
    def units(words):
        with one_process(words) as built:
            return sum(isinstance(module, FSDPModule) for module in built.model.modules())

    # Nothing of this model reaches 100M parameters, so that the root is the one unit.
    differs(units, ["--auto_wrap_policy", "size_based_auto_wrap_policy"], 1)


@check("activation_checkpointing")
def test_activation_checkpointing():
    wrapped = lambda words: sum(hasattr(b.forward, "__wrapped__") for b in blocks(words))  # noqa: E731
    differs(wrapped, ["--activation_checkpointing", 0], 0)


@check("compile")
def test_compile():
    compiled = lambda words: sum(b._compiled_call_impl is not None for b in blocks(words))  # noqa: E731
    differs(compiled, ["--compile", 1], 2)


@check("bf16")
def test_bf16(tmp_path):
    differs(lambda words: plan_of(words, tmp_path).dtype, ["--bf16", 1], torch.bfloat16)


@check("distributed_timeout")
def test_distributed_timeout(monkeypatch):
    given = []
    original = dist.init_process_group
    monkeypatch.setattr(
        dist, "init_process_group", lambda *a, **k: given.append(k["timeout"].total_seconds()) or original(*a, **k)
    )
    blocks([])
    blocks(["--distributed_timeout", 77])
    assert given == [1800, 77]


@check("weight_decay", "beta1", "beta2", "adam_eps")
def test_optimizer():
    def group(words):
        config = parse([*SYNTHETIC, *words])
        groups = build_optimizer(torch.nn.Linear(2, 2), config.optim, lr=1.0).param_groups
        return groups[0]["weight_decay"], *groups[0]["betas"], groups[0]["eps"], groups[1]["weight_decay"]

    assert group([]) == (0.2, 0.9, 0.95, 1e-8, 0)
    words = ["--weight_decay", 0.3, "--beta1", 0.5, "--beta2", 0.6, "--adam_eps", 1e-3]
    assert group(words) == (0.3, 0.5, 0.6, 1e-3, 0)


# flag -> (value, style, step whose rate changes, expected rate); the schedule's numbers: test_lr_schedule.py.
RATES: dict[str, tuple[object, str, int, float]] = {
    "lr": (0.5, "constant", 50, 0.5),
    "lr_decay_style": ("constant", "cosine", 50, 1e-4),
    "lr_decay_iters": (20, "linear", 50, 1e-5),
    "min_lr": (5e-5, "linear", 99, 5e-5),
    "warmup": (0.5, "constant", 4, 1e-5),
    "plateau": (0.9, "plateau", 80, 1e-4),
    "wsd_decay": (0.5, "wsd", 74, 5.5e-5),
    "lr_compat": ("smp_v2", "cosine", 0, 0.0),
}


@pytest.mark.parametrize("flag", RATES)
@check(*RATES)
def test_rate(flag):
    value, style, step, expected = RATES[flag]
    rate = lambda words: lr_at(parse([*SYNTHETIC, *words]).lr, step, max_steps=100)  # noqa: E731
    words = ["--lr_decay_style", style]
    assert rate([*words, f"--{flag}", value]) == pytest.approx(expected) != pytest.approx(rate(words))


@check("max_steps", "epochs", "synthetic_samples")
def test_length(tmp_path):
    steps = lambda words: plan_of(words, tmp_path).max_steps  # noqa: E731
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


@check("seed")
def test_seed(tmp_path):
    losses = lambda words, run: read_metrics(train(words, tmp_path / run))[0]["loss"]  # noqa: E731
    assert losses([], "a") == losses([], "b") != losses(["--seed", 7], "c")


@check("output_dir")
def test_output_dir(tmp_path):
    train([], tmp_path / "mine")
    assert {"config.yaml", "metrics.jsonl", "logs", "checkpoints"} <= {p.name for p in (tmp_path / "mine").iterdir()}


@check("dry_run", "dry_run_world_size")
def test_dry_run(capsys, tmp_path):
    train(["--dry_run", 1], tmp_path / "run")
    assert "= 1 processes" in capsys.readouterr().out and not list((tmp_path / "run").iterdir())
    train(["--dry_run", 1, "--dry_run_world_size", 16], tmp_path / "run")
    out = capsys.readouterr().out
    assert "dp_replicate 2 x dp_shard 8 x tp 1 = 16 processes" in out and "optimizer state" in out
    assert planned_launch(parse([*SYNTHETIC, "--dry_run", 1, "--dry_run_world_size", 16]), Launch()).world_size == 16


@check("profile_nsys")
def test_profile_nsys(tmp_path):
    with pytest.raises(UserError, match="--profile_nsys 1 needs a GPU and none is visible"):
        plan_of(["--profile_nsys", 1], tmp_path)


@check("grad_clip", "defer_gradient_sync", "clean_cache")
def test_handed_to_the_step(monkeypatch, tmp_path):
    seen: dict[str, list] = {"clip": [], "defer": [], "clean": []}
    clip, sync = train_lib.clip_grad_norm_, train_lib.set_gradient_sync
    monkeypatch.setattr(train_lib, "clip_grad_norm_", lambda m, bound: seen["clip"].append(bound) or clip(m, bound))
    monkeypatch.setattr(train_lib, "set_gradient_sync", lambda m, **k: seen["defer"].append(k["defer"]) or sync(m, **k))
    monkeypatch.setattr(train_lib, "release_cache", lambda device: seen["clean"].append(1))
    train([], tmp_path / "a")
    assert seen == {"clip": [1.0, 1.0], "defer": [False, False], "clean": []}
    train(["--grad_clip", 0.5, "--defer_gradient_sync", 1, "--clean_cache", 1], tmp_path / "b")
    assert seen == {"clip": [1.0, 1.0, 0.5, 0.5], "defer": [False, False, True, True], "clean": [1, 1]}


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


@check("data_num_workers", "shuffle_data", "document_mask")
def test_serving(files, tmp_path):
    data = ["--training_dir", files.train, "--tokenizer_name_or_dir", files.tokenizer]
    plan = lambda words: plan_of(words, tmp_path, data=data).train_data  # noqa: E731
    assert (plan([])._loader.num_workers, plan(["--data_num_workers", 1])._loader.num_workers) == (0, 1)
    order = lambda words: plan(words)._loader.dataset.shuffle  # noqa: E731
    assert (order([]), order(["--shuffle_data", 0])) == (True, False)
    keys = lambda words: next(iter(plan(words))).microbatches[0].keys()  # noqa: E731
    assert "position_ids" in keys(["--document_mask", 1]) - keys([])


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
    forward = train_lib.forward
    monkeypatch.setattr(train_lib, "forward", lambda m, *a: forwards.append(m.training) or forward(m, *a))
    for count in (10, 3):
        train(["--validation_freq", 1, "--validation_batches", count], tmp_path / f"v{count}", steps=1)
    assert forwards == [True, *[False] * 10, True, *[False] * 3]


@check("checkpoint_freq", "num_kept_checkpoints", "checkpoint_dir", "resume_from_checkpoint", "save_final_model",
       "model_dir")  # fmt: skip
def test_checkpoints(tmp_path):
    names = lambda folder: sorted(p.name for p in folder.glob("*steps"))  # noqa: E731
    a = train([], tmp_path / "a", steps=3)
    assert names(a / "checkpoints") == ["llama_v2-3steps"] and not (a / "final").exists()
    b = train(
        ["--checkpoint_freq", 1, "--checkpoint_dir", tmp_path / "c", "--save_final_model", 1], tmp_path / "b", steps=3
    )
    assert names(tmp_path / "c") == ["llama_v2-2steps", "llama_v2-3steps"] and (b / "final" / "config.json").exists()
    train(["--checkpoint_freq", 1, "--num_kept_checkpoints", 3], tmp_path / "d", steps=3)
    assert len(names(tmp_path / "d" / "checkpoints")) == 3
    resumed = ["--resume_from_checkpoint", "latest", "--save_final_model", 1, "--model_dir", tmp_path / "m"]
    train(resumed, a, steps=4)
    assert [line["step"] for line in read_metrics(a)] == [1, 2, 3, 4]
    assert (tmp_path / "m" / "model.safetensors").exists() and not (a / "final").exists()


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
    words = [word for name in NO_EFFECT for word in (f"--{name}", 1)]
    outcome = run_job(*LLAMA, *SYNTHETIC, "--max_steps", 1, "--output_dir", tmp_path / "run", *words).succeeded()
    assert len(NO_EFFECT) >= 5
    for name in NO_EFFECT:
        assert f"--{name} has no effect: {FLAGS[name].field.metadata['no_effect']}" in outcome.output


@pytest.mark.parametrize(
    ("model", "world"), [("llama70b", 64), ("llama70b", 256), ("gpt_neox_20b", 64), ("gpt_neox_20b", 256)]
)
def test_a_dry_run_plans_a_large_job_in_little_memory(model, world, tmp_path):
    code = (
        "import resource, sys, train_lib; status = train_lib.main(sys.argv[1:]); "
        "print('PEAK', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(status)"
    )
    words = [
        "--model",
        model,
        *SYNTHETIC,
        "--dry_run",
        1,
        "--dry_run_world_size",
        world,
        "--output_dir",
        tmp_path / "r",
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert f"dp_replicate {world // 8} x dp_shard 8 x tp 1 = {world} processes" in done.stdout
    degrees = [int(line.split()[0]) for line in done.stdout.partition("legal sharding degrees:")[2].splitlines()[2:-1]]
    assert degrees == [2**k for k in range(len(degrees))] and degrees[-1] == world
    assert int(done.stdout.rpartition("PEAK")[2]) < 1.5 * 2**20  # KiB
