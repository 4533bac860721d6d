"""Command lines that were written for SMP v2: taken as they are, or refused at once with what to do."""

from __future__ import annotations

import json
import logging
import pathlib

import pytest

import train_lib
from docs.smp_v2_tables import FLAGS as SMP_V2
from smp.errors import ConfigError
from smp.models.model_config import resolve_model
from smp.parallel.tensor.technique import overlap_obstacle
from smp.runtime import Launch
from smp.train.arguments import FLAGS, parse_args
from smp.train.checked_job import check_job
from smp.train.dry_run import planned_launch
from tests.job import LLAMA

# Facts of public notebooks and scripts: the settings that they give, and the estimator's parameters.
FACTS = json.loads((pathlib.Path(__file__).parents[1] / "data" / "smp_v2_command_lines.json").read_text())
LINES = [
    {**line, "flags": {**FACTS["shared"], **line["flags"], **resumed}}
    for line in FACTS["lines"]
    for resumed in ({}, *([{"resume_from_checkpoint": line["resumed"]}] if "resumed" in line else []))
]
OFFLOAD = "sm_activation_offloading"


def words_of(flags, *, processes: int | None = None) -> list[str]:
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return words if processes is None else [*words, "--dry_run", "1", "--dry_run_world_size", str(processes)]


def said(words: list[str], capsys) -> list[str]:
    """The problems with which the job refuses a command line."""
    assert train_lib.main([*words]) == 2
    lines = capsys.readouterr().err.splitlines()
    return [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]


def plan_of(words: list[str]):
    config = parse_args(words)
    return check_job(config, planned_launch(config, Launch()))


@pytest.mark.parametrize("line", LINES, ids=lambda line: line["flags"]["model_type"])
def test_a_command_line_passes_on_a_machine_without_gpus_and_files(line):
    """Its parameters come as flags, as SageMaker's toolkit writes them, or as JSON: the same job."""
    parameters = {**FACTS["parameters"], **line["parameters"]}
    base = words_of(line["flags"], processes=line["processes"])
    flags = {("offload_activations" if name == OFFLOAD else name): value for name, value in parameters.items()}
    text = ",".join(f"{name}={value}" for name, value in parameters.items())
    plan = plan_of([*base, *words_of(flags)])
    assert parse_args([*base, "--mp_parameters", text]) == plan.config
    assert parse_args([*base, "--mp_parameters", json.dumps(parameters)]) == plan.config
    for axis, name in (("tp", "tensor_parallel_degree"), ("ep", "expert_parallel_degree")):
        assert plan.mesh.degree(axis) == parameters.get(name, 1)
    assert plan.mesh.world_size == line["processes"]
    assert plan.mesh.cp.size == parameters.get("context_parallel_degree", 1)
    assert plan.config.activation.offload_activations is parameters[OFFLOAD]
    if "num_local_experts" in line["flags"]:
        made, heads = plan.model.hf_config, line["flags"]["num_heads"]
        assert (made.num_local_experts, made.num_experts_per_tok) == (line["flags"]["num_local_experts"], 2)
        assert made.num_key_value_heads == line["flags"].get("num_key_value_heads", heads)
    wants_gpus = parameters[OFFLOAD] or line["flags"].get("distributed_backend") == "nccl"
    assert plan.device.type == ("cuda" if wants_gpus else "cpu")
    ignored = {sentence.split()[0] for sentence in plan.config.without_effect()}
    given = {"use_smp_flash_attn", "use_smp_implementation"} & line["flags"].keys()
    assert {f"--{name}" for name in given} <= ignored


def test_the_whole_dry_run_prints_its_report(capsys):
    # The smallest: sizes are left to a directory that is not here.
    line = next(line for line in LINES if "num_layers" not in line["flags"])
    assert train_lib.main([*words_of(line["flags"], processes=8), "--mp_parameters", "tensor_parallel_degree=2"]) == 0
    assert "a process on a GPU in bfloat16" in capsys.readouterr().out
    hyperpod = {**FACTS["hyperpod"], "num_layers": 2}  # of 80
    assert train_lib.main(words_of(hyperpod, processes=64)) == 0
    out = capsys.readouterr().out
    assert "dp_replicate 1 x dp_shard 64 x tp 1 = 64 processes" in out and "predicted host memory" in out
    assert "(chosen on the GPUs)" in out


@pytest.mark.parametrize("kind", ["gpt_neox", "llama_v2", "llama_v3", "mistral", "gpt2", "mixtral"])
def test_all_defaults_spelled_out_make_the_model_of_none(kind):
    """What SMP v2's script ignored for a model changes nothing of it, ``--attn_pdrop 0.1`` of a Llama first of all."""
    given = {**SMP_V2, "fp8": 0, "model_type": kind, "training_dir": None, "test_dir": None}
    names = [name for name, value in given.items() if value not in (None, "") and name == FLAGS[name].field.name]
    config = parse_args([*words_of({name: given[name] for name in names}), "--use_synthetic_data", "1"])
    plain = parse_args(["--model_type", kind, "--use_synthetic_data", "1"])
    left_out = {sentence.split()[0] for sentence in config.unapplied}
    assert ("--attn_pdrop" in left_out) is (kind != "gpt2") and "--rope_scaling_factor" in left_out
    resolved = resolve_model(config.model).hf_config
    assert resolved.to_dict() == resolve_model(plain.model).hf_config.to_dict()
    assert ("--same_seed" in {sentence.split()[0] for sentence in config.without_effect()}) and "same_seed" in names


def test_smp_v2s_mixtral_is_balanced_by_sinkhorn():
    def method(*words):
        return parse_args([*words, "--use_synthetic_data", "1"]).experts.method

    mixtral = ["--model_type", "mixtral"]
    assert (method(*mixtral), method("--model", "mixtral_tiny"), method(*LLAMA)) == ("sinkhorn", "none", "none")
    assert method(*mixtral, "--moe_load_balancing", "none") == "none"
    assert method(*mixtral, "--hf_pretrained_model_name_or_dir", "/absent") == "none"


def test_other_values_than_smp_v2s_defaults_count():
    def model(*words):
        return resolve_model(parse_args([*words, "--use_synthetic_data", "1"]).model).hf_config

    assert model("--model_type", "llama_v2", "--attn_pdrop", "0.2").attention_dropout == 0.2
    assert model("--model", "llama_tiny", "--attn_pdrop", "0.1").attention_dropout == 0.1
    # The width of Llama 3 8B is SMP v2's default of Mistral's.
    assert model("--model_type", "llama_v3", "--intermediate_size", "14336").intermediate_size == 14336
    both = ["--intermediate_size", "14336", "--llama_intermediate_size", "11008"]
    assert model("--model_type", "llama_v3", *both).intermediate_size == 11008
    scaled = ["--rope_scaling_type", "llama3", "--rope_scaling_factor", "8.0"]
    assert model("--model_type", "llama_v3", *scaled).rope_parameters["factor"] == 8.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tensor_parallel_degre=2", "unknown key tensor_parallel_degre: did you mean tensor_parallel_degree?"),
        (
            "partitions=2",
            "unknown key partitions: give hybrid_shard_degree, .*random_seed, and anything else as a flag",
        ),
        ("random_seed=7", "random_seed 7 is not available: --seed is the job's one seed"),
        ("tensor_parallel_degree", "takes key=value,key=value or a JSON object, got 'tensor_parallel_degree'"),
        ("{tensor_parallel_degree: 2}", "takes key=value,key=value or a JSON object"),
        ("tensor_parallel_degree=two", "--tensor_parallel_degree takes an integer, got 'two'"),
        ("max_steps=2", "unknown key max_steps"),
        ("hybrid_shard_degree=1", "says --hybrid_shard_degree 1, and that flag is given as well: leave one out"),
    ],
)
def test_parameters_that_cannot_be_given(text, expected):
    words = ["--use_synthetic_data", "1", "--hybrid_shard_degree", "2", "--mp_parameters", text]
    with pytest.raises(ConfigError, match=expected) as caught:
        parse_args(words)
    assert len(caught.value.problems) == 1


def test_parameters_that_change_nothing_are_taken(caplog):
    text = "random_seed=0,allow_empty_shards=True,fsdp_cache_flush_warnings=False, sm_activation_offloading = false"
    with caplog.at_level(logging.INFO, "smp.compat"):
        config = parse_args(["--use_synthetic_data", "1", "--mp_parameters", text])
    assert "allow_empty_shards has no effect" in caplog.text
    assert config.given == {"use_synthetic_data", "fsdp_cache_flush_warnings", "offload_activations"}
    assert config.parallel.fsdp_cache_flush_warnings is False


def test_the_estimators_variable_stands_below_flags_and_file(monkeypatch, caplog, tmp_path):
    base = ["--use_synthetic_data", "1"]
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", '{"tensor_parallel_degree": 2, "sm_activation_offloading": true}')
    with caplog.at_level(logging.INFO, "smp.compat"):
        config = parse_args(base)
    assert (config.parallel.tensor_parallel_degree, config.activation.offload_activations) == (2, True)
    assert "SM_HP_MP_PARAMETERS, the estimator's parameters, gives --tensor_parallel_degree 2" in caplog.text
    file = tmp_path / "job.yaml"
    file.write_text("tensor_parallel_degree: 4\n")
    for words in (["--tensor_parallel_degree", "4"], ["--config", str(file)]):
        caplog.clear()
        assert parse_args([*base, *words]).parallel.tensor_parallel_degree == 4
        assert "--tensor_parallel_degree is 4, as given, and not SM_HP_MP_PARAMETERS's 2" in caplog.text
    caplog.clear()
    assert parse_args([*base, "--offload_activations", "1"]).activation.offload_activations
    assert "as given, and not" not in caplog.text  # true is 1
    same = ["--offload_activations", "true", "--mp_parameters", "sm_activation_offloading=1"]
    assert parse_args([*base, *same]).activation.offload_activations
    assert parse_args([*base, "--mp_parameters", "hybrid_shard_degree=1"]).parallel.tensor_parallel_degree == 1
    for text, expected in (
        ("[1]", "SM_HP_MP_PARAMETERS=.1. is no JSON object"),
        ('{"partitions": 2}', "SM_HP_MP_PARAMETERS: unknown key partitions"),
    ):
        monkeypatch.setenv("SM_HP_MP_PARAMETERS", text)
        with pytest.raises(ConfigError, match=expected):
            parse_args(base)


def test_all_problems_come_in_one_round(capsys):
    words = "--fp8_all_gather 1 --sm_activation_offloading 1 --distributed_backend nccl --profile_nsys 1"
    others = "--sliding_window 3 --shard_degree 2 --output_dir /proc/x --use_synthetic_data 1"
    found = said([*map(str, LLAMA), *words.split(), *others.split()], capsys)
    wanted = [
        "--sm_activation_offloading: here it is --offload_activations", "--fp8_all_gather 1 gathers weights with",
        "nccl needs GPUs", "--profile_nsys 1 needs a GPU", "--sliding_window is no setting",
        "--output_dir /proc/x cannot be written", "--hybrid_shard_degree 2 does not divide",
    ]  # fmt: skip
    assert len(found) == len(wanted)
    for text in wanted:
        assert sum(text in line for line in found) == 1, (text, found)


LACKING = [
    "--distributed_backend nccl", "--profile_nsys 1", "--offload_activations 1", "--expandable_segments 1",
    "--enable_memory_profiling 1 --memory_snapshot 1", "--attn_implementation fused",
    "--attn_implementation flash_attention_2", "--tensor_parallel_degree 2 --tp_overlap 1",
    "--data_num_workers 999", "--checkpoint_dir /proc/x --output_dir /proc/y --tensorboard_dir /proc/z",
    "--use_synthetic_data 0 --training_dir /absent --document_mask 1",
]  # fmt: skip


@pytest.mark.parametrize("words", LACKING)
def test_what_this_machine_lacks_is_refused_here_and_not_in_a_dry_run_for_others(words):
    job = [*map(str, LLAMA), *([] if "/absent" in words else ["--use_synthetic_data", "1"]), *words.split()]
    with pytest.raises(ConfigError):
        plan_of([*job, "--dry_run", "1"])
    plan = plan_of([*job, "--dry_run", "1", "--dry_run_world_size", "16"])
    assert plan.device.type == ("cpu" if "/" in words or "workers" in words else "cuda")


def test_a_dry_run_asks_no_peers_whether_gpus_read_each_others_memory():
    assert overlap_obstacle(2, "cuda") == "the ranks ask their GPUs when they run"


def test_what_is_wrong_on_any_machine_is_refused_in_a_dry_run_for_others(caplog):
    job = [*map(str, LLAMA), "--dry_run", "1", "--dry_run_world_size", "8"]
    for words in (["--training_dir", "allenai/c4"], ["--hf_pretrained_model_name_or_dir", "EleutherAI/gpt-neox-20b"]):
        with pytest.raises(ConfigError, match=r"hubs are never asked: download it first, `hf download"):
            plan_of([*job, "--use_synthetic_data", "0", *words])
    with caplog.at_level(logging.WARNING, "smp.train"):
        plan_of([*job, "--training_dir", "/absent"])
    assert "--training_dir is not checked: /absent is not on this machine" in caplog.text
