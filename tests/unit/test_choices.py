"""Settings that are ``auto``: who decides them, what a choice sees, and what is written down."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
import yaml
from transformers import GPTNeoXConfig

import train_lib
from smp.config import AUTO, ActivationConfig, LossConfig, ParallelConfig, Settings
from smp.mesh import lay_out
from smp.models.registry import family_of
from smp.parallel import allocator, choices, compile_blocks, lora
from smp.parallel.choices import Choice, Situation, agree_on_choices, choose
from smp.parallel.parallelize import find_problems
from smp.parallel.technique import Setup
from smp.parallel.tensor import technique
from smp.train import checked_job, job
from smp.train.arguments import FLAGS
from smp.train.job import batch_of_flags, choose_settings, sizes
from tests import experts
from tests.distributed import run_distributed
from tests.flags import SYNTHETIC, check, in_child, parse, plan_of
from tests.job import LLAMA, run_job

COMPILE = "compile"
MADE = [Choice(COMPILE, True, "first"), Choice("z_loss", 0.0, "a setting that is given")]


def situation(settings, *, device="cuda", fits=lambda **values: True):
    return Situation(None, settings, device, 1, fits)


def undecided(**given):
    return Settings((ActivationConfig(**given), LossConfig()))


@pytest.fixture
def shown(monkeypatch):
    monkeypatch.delitem(choices.GPU_DEFAULTS, "loss_chunk_tokens")
    for name in (COMPILE, "later"):
        monkeypatch.setitem(choices.GPU_DEFAULTS, name, "a page, a date, a device")


def chooser(*made):
    return lambda situation: iter(made)


def test_a_cpu_has_the_plain_values(shown):
    settings = undecided()
    assert settings[ActivationConfig].compile is False
    assert choose(settings, situation(settings, device="cpu"), [chooser(*MADE)]) == []


def test_what_is_given_stays(shown):
    settings = undecided()
    assert choose(settings, situation(settings), [chooser(*MADE)]) == MADE[:1]
    given = undecided(compile=False)
    assert choose(given, situation(given), [chooser(*MADE)]) == []


def test_later_choices_see_earlier_ones_also_in_the_memory_that_they_ask_for(shown):
    asked = []

    def later(situation):
        yield Choice("later", situation.settings[ActivationConfig].compile, "")
        situation.fits(offload_activations=True)
        situation.fits(compile=False)

    settings = undecided()
    choose(settings, situation(settings, fits=lambda **values: asked.append(values)), [chooser(*MADE), later])
    assert asked == [{"compile": True, "offload_activations": True}, {"compile": False}]


@pytest.mark.parametrize(("settings", "model", "reason"), [
    ([lora.Config(lora_rank=2, lora_dropout=0.1)], None, "--lora_dropout draws in blocks"),
    ([], GPTNeoXConfig(hidden_dropout=0.1), "hidden_dropout draws in blocks"),
])  # fmt: skip
def test_blocks_that_draw_are_not_compiled_unasked(settings, model, reason):
    seen = dataclasses.replace(situation(Settings((ActivationConfig(), *settings))), hf_config=model)
    assert list(compile_blocks.choose(seen)) == [Choice(COMPILE, False, reason)]


def test_split_blocks_are_not_compiled_unasked():
    split = dataclasses.replace(situation(undecided()), hf_config=GPTNeoXConfig(), mesh=lay_out(1, 1, 2))
    (choice,) = compile_blocks.choose(split)
    assert not choice.value and choice.reason.startswith("not yet measured on several GPUs")


def test_blocks_with_experts_are_not_compiled():
    config = experts.config_of("mixtral")
    seen = dataclasses.replace(situation(undecided()), hf_config=config)
    (choice,) = compile_blocks.choose(seen)
    assert not choice.value and choice.reason.startswith("blocks with experts cannot be compiled")
    asked = Setup(family_of(config), lay_out(), Settings((ActivationConfig(compile=True),)))
    assert find_problems(config, asked) == [f"--compile 1: {choice.reason}: leave it out"]


def test_the_first_choice_of_a_setting_stays(shown):
    settings = undecided()
    first, second = Choice(COMPILE, False, "it cannot be"), Choice(COMPILE, True, "a compiler is here")
    assert choose(settings, situation(settings), [chooser(first), chooser(second)]) == [first]


def test_until_a_gpu_has_shown_it_the_plain_value_is_chosen_and_says_so(monkeypatch):
    monkeypatch.delitem(choices.GPU_DEFAULTS, COMPILE)
    settings = undecided()
    (choice,) = choose(settings, situation(settings), [chooser(*MADE)])
    assert str(choice) == "--compile 0 (not yet measured on a GPU; --compile 1: first)"
    plain = Choice(COMPILE, False, "no compiler")
    assert choose(settings, situation(settings), [chooser(plain)]) == [plain]


def test_what_a_gpu_has_shown_is_chosen_alone(shown):
    settings = Settings((ActivationConfig(), LossConfig(), ParallelConfig()))
    others = [Choice("tp_overlap", True, "they read each other's memory"), Choice("loss_chunk_tokens", 4096, "it fits")]
    found = choose(settings, situation(settings), [chooser(*MADE, *others)])
    assert [str(choice) for choice in found] == [
        "--compile 1 (first)",
        "--tp_overlap 0 (not yet measured on several GPUs; --tp_overlap 1: they read each other's memory)",
        "--loss_chunk_tokens 1024 (not yet measured on a GPU; --loss_chunk_tokens 4096: it fits)",
    ]


def _check_agreement(rank_0, rank_1, expected):
    rank = torch.distributed.get_rank()
    mine = [Choice(COMPILE, value, f"on host {rank}") for value in (rank_0, rank_1)[rank : rank + 1]]
    assert [(c.value, c.reason) for c in agree_on_choices(undecided(), mine)] == [
        (value, reason.format(rank)) for value, reason in expected
    ]


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ((True, True), [(True, "on host {}")]),
        ((True, False), [(False, "rank 0: on host 0; rank 1: on host 1")]),
    ],
)
def test_ranks_that_would_choose_differently_take_the_plain_value(made, expected):
    run_distributed(_check_agreement, *made, expected, world_size=2)


def test_every_setting_that_may_be_auto_is_decided(tmp_path, monkeypatch):
    """By a chooser, or by planning."""
    monkeypatch.setattr(technique, "overlap_obstacle", lambda degree, device_type: "")
    may_be = {name for name, flag in FLAGS.items() if flag.field.metadata["plain"] is not None}
    plan = plan_of(["--sharding_strategy", "full_shard"], tmp_path)
    degrees = ["--tensor_parallel_degree", 2, "--context_parallel_degree", 2]
    plan = dataclasses.replace(plan, config=parse([*LLAMA, *SYNTHETIC, *degrees]))
    seen = dataclasses.replace(situation(plan.settings), hf_config=plan.model.hf_config, mesh=lay_out(1, 2, 2, 2))
    # That backward recomputes nothing leaves out how it does.
    seen = dataclasses.replace(seen, fits=lambda activation_checkpointing=True, **values: activation_checkpointing)
    made = [choice for chooser in job.CHOOSERS for choice in chooser(seen)]
    assert {choice.name for choice in made} | {"sharding_strategy"} == may_be
    for name in may_be:
        assert FLAGS[name].field.default == AUTO


def on_gpu(plan):
    """The plan as a GPU's; bf16 as there."""
    return dataclasses.replace(plan, device=torch.device("cuda", 0), dtype=torch.bfloat16)


def test_what_is_chosen_fits(tmp_path, shown, monkeypatch):
    """And the plan's own prediction, of the report and when memory runs out, has the chosen values."""

    def keep_all(situation):
        if situation.fits(loss_chunk_tokens=0):
            yield Choice(COMPILE, True, "fits")

    monkeypatch.setattr(job, "CHOOSERS", [keep_all])
    plan = on_gpu(plan_of(["--train_batch_size", 64], tmp_path))
    shape, work = sizes(plan)
    needed = job.peak_bytes(shape, plan.mesh, work.changed(loss_chunk_tokens=0))
    batch = batch_of_flags(plan.config, plan.mesh)
    assert choose_settings(plan, needed - 1, batch=batch) == []
    plan.choices.extend(choose_settings(plan, needed, batch=batch))
    assert sizes(plan)[1].settings[ActivationConfig].compile is True
    assert choose_settings(plan, needed, batch=batch) == []  # decided


@pytest.mark.full
def test_a_dry_run_names_every_setting_that_is_auto(tmp_path, capsys, monkeypatch):
    words = [*LLAMA, *SYNTHETIC, "--output_dir", str(tmp_path / "run"), "--dry_run", "1", "--dry_run_world_size", "16"]
    dry = lambda *more: run_in_child([*words, *map(str, more)], tmp_path / "out")  # noqa: E731
    auto = lambda *more: dry(*more).partition("settings that are auto:\n")[2].partition("\n\n")[0]  # noqa: E731
    lines = auto()
    assert "--compile 0 (nothing to choose here)" in lines and "--sharding_strategy hybrid_shard (nothing" in lines
    idle = ("--tp_overlap", "--cp_comm_type", "--activation_checkpointing_mode")
    assert [name for name in idle if name in lines] == [idle[2]]
    assert not [name for name in idle if name in auto("--activation_checkpointing", 0)]
    assert "--attn_implementation" in auto("--compile", 0) and "--compile 0" not in auto("--compile", 0)
    lines = dry("--num_heads", 8, "--num_key_value_heads", 8, "--tensor_parallel_degree", 8)
    assert "mesh: dp_replicate 1 x dp_shard 2 x tp 8" in lines
    assert "--sharding_strategy full_shard (tensor parallelism takes all of a host)" in lines


@in_child
def run_in_child_to(words, path):
    import contextlib

    with path.open("w") as file, contextlib.redirect_stdout(file):
        assert train_lib.main(words) == 0


def run_in_child(words, path):
    run_in_child_to(words, path)
    return path.read_text()


def test_config_yaml_keeps_auto_and_tells_what_was_chosen(tmp_path, monkeypatch):
    """Read again, it leaves the choice to the next run."""
    monkeypatch.setattr(checked_job, "choose_strategy", lambda parallel, **world: "full_shard")
    words = [*LLAMA, *SYNTHETIC, "--max_steps", 1, "--output_dir", tmp_path / "run"]
    output = run_job(*words).succeeded().output
    line = "--sharding_strategy full_shard (tensor parallelism takes all of a host)"
    assert f"Chosen: {line}" in output
    text = (tmp_path / "run" / "config.yaml").read_text()
    assert f"# chosen: {line}\n" in text
    saved = yaml.safe_load(text)
    assert saved["compile"] == saved["sharding_strategy"] == AUTO
    assert parse(["--config", tmp_path / "run" / "config.yaml"]).flat() == saved


# --- CUDA's allocator


def allocator_choice(settings, **environment):
    (choice,) = allocator.choose(situation(settings))
    return choice


def test_segments_grow_unless_the_user_has_set_the_allocator(monkeypatch, tmp_path):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    settings = plan_of([], tmp_path).given
    assert allocator_choice(settings).value is True
    assert allocator_choice(settings.changed(distributed_backend="smddp")).value is False
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "max_split_size_mb:512")
        assert allocator_choice(settings) == Choice("expandable_segments", False, f"{name} is set, and stays")
        monkeypatch.delenv(name)


@check("expandable_segments")
def test_expandable_segments(monkeypatch, tmp_path):
    """The setting reaches torch also after its allocators have been used, when it reads no variable any more."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    if (read := getattr(torch._C, "_accelerator_getAllocatorSettings", None)) is None:
        pytest.skip("torch 2.11 does not tell the allocator's settings")
    assert "expandable_segments" not in read()
    allocator.use_expandable_segments()
    assert read() == "expandable_segments:True"
    given = ["--expandable_segments", 1]
    with pytest.raises(checked_job.ConfigError, match="--expandable_segments 1 needs a GPU and none is visible"):
        plan_of(given, tmp_path)
    config = parse([*LLAMA, *SYNTHETIC, *given])
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    problems = checked_job._needs_of_settings(config, torch.device("cuda", 0))
    assert re.match("--expandable_segments 1 and PYTORCH_CUDA_ALLOC_CONF both set the allocator", problems[0])
