"""The command line: types, files, names, and every problem at once."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import random
import re

import pytest
import yaml

import smp
from docs import make_tables
from docs.smp_v2_tables import FLAGS as SMP_V2
from smp.compat import other_trainers
from smp.compat.absent import ABSENT
from smp.errors import ConfigError, UserError
from smp.models.families import list_presets
from smp.parallel.parallelize import settings_of
from smp.train.arguments import FLAGS, SECTIONS, parse_args

ROOT = pathlib.Path(__file__).parents[2]
SYNTHETIC = ["--use_synthetic_data", "1"]


def parse(*words: object):
    return parse_args([*SYNTHETIC, *map(str, words)])


def problems(*words: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(*words)
    return caught.value.problems


def from_yaml(tmp_path, text: str, *words: object):
    (tmp_path / "run.yaml").write_text(text)
    return parse("--config", tmp_path / "run.yaml", *words)


def test_every_flag_of_smp_v2_is_known():
    assert [name for name in SMP_V2 if name not in FLAGS] == []


@pytest.mark.parametrize(("word", "value"), [("1", True), ("0", False), ("true", True), ("False", False)])
def test_booleans(word, value):
    assert parse("--bf16", word).precision.bf16 is value


def test_lists_equals_signs_and_aliases():
    config = parse(
        "--checkpoint_dir", "a", "b", "--checkpoint_freq", 5, 10, "--num_kept_checkpoints", 1, 2, "--lr=1e-3",
        "--max_training_steps=7", "--shard_degree", 4,
    )  # fmt: skip
    assert config.checkpoint.checkpoint_dir == ("a", "b") and config.checkpoint.checkpoint_freq == (5, 10)
    assert (config.lr.lr, config.run.max_steps, config.parallel.hybrid_shard_degree) == (1e-3, 7, 4)
    assert {"max_steps", "hybrid_shard_degree"} <= config.given


def test_directories_at_home_are_meant_in_a_file_and_behind_an_equals_sign_too(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "run.yaml").write_text("checkpoint_dir: ~/saved\n")
    words = ["--output_dir=~/runs/x", "--training_dir", "s3://bucket/~/x", "--text_document_separator", "~"]
    config = parse_args(["--model", "llama_tiny", "--config", str(tmp_path / "run.yaml"), *words])
    assert config.run.output_dir == "/home/me/runs/x"
    assert config.checkpoint.checkpoint_dir == ("/home/me/saved",)
    assert config.data.training_dir == "s3://bucket/~/x"
    assert config.data.text_document_separator == "~"


def test_flags_stand_above_the_file_and_the_file_above_defaults(tmp_path):
    config = from_yaml(tmp_path, "lr: 1e-3\nmax_training_steps: 9\nbeta1: 0.8\n", "--max_steps", 3)
    assert (config.lr.lr, config.run.max_steps, config.optim.beta1, config.optim.beta2) == (1e-3, 3, 0.8, 0.95)
    assert {"lr", "max_steps", "beta1"} <= config.given and "beta2" not in config.given


def test_yaml_values(tmp_path):
    text = (
        "checkpoint_dir: [a, b]\ncheckpoint_freq: [3, 4]\nnum_kept_checkpoints: [1, 1]\nbf16: no\nepochs: null\n"
        "tensorboard_dir: []\ngrad_clip: .inf\ntext_document_separator: ''\ndataset_type: text\n"
        "tokenizer_name_or_dir: t\nuse_smp_flash_attn: null\nsummary_first_pdrop: null\n"
    )
    config = from_yaml(tmp_path, text)
    assert config.checkpoint.checkpoint_freq == (3, 4) and config.precision.bf16 is False
    assert config.run.epochs is None and config.logging.tensorboard_dir == ()
    assert config.optim.grad_clip == float("inf") and config.data.text_document_separator == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max_step: 3", "unknown key max_step: did you mean max_steps"),
        ("straggler_ratio: 2", "unknown key straggler_ratio: leave it out: `py-spy top`"),
        ("learning_rate: 1", "run.yaml: unknown key learning_rate: here it is lr$"),
        ("adapter: lora", "unknown key adapter: --lora_rank N trains adapters of that rank"),
        ("config_file: other.yaml", "unknown key config_file: --help lists"),
        ("config: other.yaml", "unknown key config(?!.*mean config)"),
        ("lr: 1e-3\nbeta1: 0.8\nlr: 1e-4\n", "line 3 .*: lr is given there and in line 1: keep one of them"),
        ("lr: 1\n'lr': 2", "line 2 .*: lr is given there and in line 1"),
        ("max_steps: 2\nmax_training_steps: 3", "max_training_steps is another name of .*, max_steps: keep one"),
        ("lr: null", "--lr takes a number, got 'null'"),
        ("tensorboard_dir: null", "--tensorboard_dir takes one or more of text, got 'null'"),
        ("output_dir: {a: b}", "--output_dir takes text, got"),
        ("checkpoint_dir: [[a]]", "--checkpoint_dir takes one or more of text, got"),
        ("lr: [1, 2]", "--lr takes a number, got 1 2"),
        ("max_steps: 3.5", "--max_steps takes an integer, got '3.5'"),
        ("- lr", "must contain settings as `name: value` lines, got a list"),
        ("lr: 1\n  b: : 2", "line 2 is not valid YAML"),
        ("lr: 2024-13-45", "is not valid YAML"),
        ("[" * 3000, "is not valid YAML"),
    ],
)
def test_yaml_that_cannot_be_used(text, expected, tmp_path):
    with pytest.raises(ConfigError, match=expected):
        from_yaml(tmp_path, text)


def test_none_leaves_out_what_the_file_gives(tmp_path):
    (tmp_path / "config.yaml").write_text("resume_from_checkpoint: latest\nmax_context_width: 8\n")
    words = ["--resume_from_checkpoint", "none", "--max_context_width", "none"]
    config = parse("--config", tmp_path / "config.yaml", *words)
    assert config.checkpoint.resume_from_checkpoint is None and config.model.max_context_width is None


def test_a_missing_config_file_is_one_sentence(tmp_path):
    (problem,) = problems("--config", tmp_path / "absent.yaml")
    assert "absent.yaml cannot be read" in problem and "give the path" in problem


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--checkpoint_dir", "a", "b", "--checkpoint_freq", 1, 2, "--num_kept_checkpoints", 3, 4),
        ("--lr", 3e-5, "--grad_clip", "inf", "--tensorboard_dir", "t", "--bf16", 1, "--epochs", 2),
        ("--text_document_separator", "", "--dataset_type", "text", "--tokenizer_name_or_dir", "no: yes"),
    ],
)
def test_the_written_configuration_reads_back_the_same(words, tmp_path):
    config = parse(*words)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.flat()))
    json.dumps(config.flat(), allow_nan=False)  # as checkpoints and the history keep them
    again = parse_args(["--config", str(tmp_path / "config.yaml")])
    assert {**vars(again), "given": None} == {**vars(config), "given": None}
    # As the planner and the reader of a checkpoint build the techniques' sections.
    rebuilt = settings_of(json.loads(json.dumps(config.flat()))).sections
    assert [section for section in rebuilt if section not in vars(config).values()] == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--max_step", 3], "unknown flag --max_step: did you mean max_steps"),
        (["--hybrid-shard-degree", 2], "did you mean hybrid_shard_degree"),
        (["--learning_rte=1"], "unknown flag --learning_rte: --help lists all of them"),
        (["--learning_rate", 1], "unknown flag --learning_rate: here it is --lr$"),
        (["--batch_size", 4], "--batch_size: .* of a rank .* --train_batch_size .* all ranks --global_batch_size$"),
        (["--num_train_epochs=2"], "--num_train_epochs: here it is --epochs$"),
        (["--seq_len", 8], "here it is --max_context_width$"),
        (["--tensor-parallel-size", 2], "unknown flag --tensor-parallel-size: here it is --tensor_parallel_degree$"),
        (["--training.seq_len", 8], "here it is --max_context_width$"),
        (["--training.global_batch_size", 8], "here it is --global_batch_size$"),
        (["--lora", 1], "unknown flag --lora: --lora_rank N trains adapters of that rank"),
        (["--lora_r", 8], "--lora_r: here it is --lora_rank$"),
        (["--tensor_model_parallel_degree", 2], "here it is --tensor_parallel_degree$"),
        (["--max_position_embeddings", 2048], "here it is --max_context_width$"),
        (["--per_device_batch_size", 2], "here it is --train_batch_size$"),
        (
            ["--layernorm_epsilon", 1e-5],
            "leave it out: it is the value of the model's config.json, which --model takes",
        ),
        (["--do_finetune", 1], "a job that is given --hf_pretrained_model_name_or_dir finetunes$"),
        (["--packing", 1], "leave it out: sequences are always packed, and --document_mask 1 keeps documents apart"),
        (["--load_in_8bit", 1], "weights of 8 bits and adapters other than LoRA are not in this version"),
        (["--load_in_4bit", 1], "--qlora 1 with --lora_rank N stores the frozen weights in 4 bits"),
        (["--pipeline_parallel_degree", 2], "pipeline parallelism is not in this version"),
        (["--fp16", 1], "fp16 is not in this version: use --bf16 1$"),
        (["--optim", "adam"], "unknown flag --optim: here it is --optimizer$"),
        (["--nproc_per_node", 2], "it is the launcher's, .*python -m smp.launch.local --nproc_per_node N -m smp.train"),
        (["--auto_find_batch_size", 1], "--auto_find_batch_size: --help lists all of them"),
        (
            ["--model_type", "mixtrl"],
            "takes gpt_neox, llama_v2, llama_v3, mistral, mixtral, gpt2, got 'mixtrl'; .* mixtral",
        ),
        (["--conf", "a.yaml"], "did you mean config"),
        (["--sharding_strategy", "ful_shard"], "takes .*full_shard.*did you mean full_shard"),
        (["--bf16", "yes"], "--bf16 takes 0 or 1, got 'yes'"),
        (["--bf16"], "--bf16 takes 0 or 1, got nothing"),
        (["--train_batch_size", 2, 4], "takes an integer, got 2 4"),
        (["--lr", "nan"], "--lr takes a number, got 'nan'"),
        (["--checkpoint_freq", 0], "--checkpoint_freq must be at least 1, got 0"),
        (["--seed", 10**25], "--seed must be at most 9223372036854775807"),
        (["--distributed_timeout", "inf"], "--distributed_timeout must be at most"),
        (["--straggler_ratio", 2], "unknown flag --straggler_ratio: leave it out: `py-spy top` and --profile_nsys"),
        (["--dry_run_world_size", 4], "only with --dry_run 1"),
        (["--global_batch_size", 8, "--gradient_accumulation_steps", 2], "give one of them"),
        (["--checkpoint_dir", "a", "b"], "one value per directory: got 2, 1 and 1"),
    ],
)
def test_what_is_refused(words, expected):
    found = problems(*words)
    assert len(found) == 1 and re.search(expected, found[0]), found


def test_names_of_other_trainers_lead_to_flags_that_there_are():
    theirs = [name for table in (other_trainers.SAME, other_trainers.OTHERWISE) for names in table.values()
              for name in names.split()]  # fmt: skip
    assert len(theirs) == len(set(theirs)) and not set(theirs) & {*FLAGS}
    live = [name for name, flag in FLAGS.items() if not flag.is_missing]
    for pattern in other_trainers.MISSING.values():
        assert not [name for name in (*live, *theirs) if re.fullmatch(pattern, name)], pattern
    flags = {*FLAGS, "config", "nproc_per_node"}
    assert {*other_trainers.SAME} <= flags
    said = " ".join([*other_trainers.OTHERWISE, *other_trainers.MISSING])
    assert {*re.findall(r"--(\w+)", said)} <= flags


def test_a_stray_word_before_flags_is_named():
    with pytest.raises(ConfigError, match="'stray' belongs to no flag"):
        parse_args(["stray", *SYNTHETIC])


def test_all_problems_at_once_each_once(tmp_path):
    (tmp_path / "run.yaml").write_text("max_stepz: 1\nbeta1: 2\n")
    found = problems(
        "--config", tmp_path / "run.yaml", "--unknown_thing", "a", "b", "--lr", "x", "--fp8_all_gather", 1,
        "--moe_all_to_all_dispatcher", 0,
        "--sharding_strategy", "no_shard", "--shard_degree", 2,
    )  # fmt: skip
    wanted = ["max_stepz", "--unknown_thing", "--moe_all_to_all_dispatcher 0", "--lr takes", "no_shard contradicts",
              "--beta1", "--fp8_all_gather 1"]  # fmt: skip
    assert len(found) == len(wanted), found
    for words in wanted:
        assert sum(words in problem for problem in found) == 1, (words, found)


def test_sagemaker_channels_stand_in_for_the_data_folders(monkeypatch):
    monkeypatch.setenv("SM_CHANNEL_TRAIN", "/in/train")
    monkeypatch.setenv("SM_CHANNEL_TEST", "/in/test")
    assert (parse_args([]).data.training_dir, parse_args([]).data.test_dir) == ("/in/train", "/in/test")
    assert parse_args(["--training_dir", "mine"]).data.training_dir == "mine"


def test_every_setting_has_a_help_and_one_place():
    names = [f.name for cls in SECTIONS.values() for f in dataclasses.fields(cls)]
    assert len(names) == len(set(names)) and {f.field.name for f in FLAGS.values()} == set(names)
    absent = {row.name for rows in ABSENT.values() for row in rows}
    assert absent == {name for name, flag in FLAGS.items() if flag.is_missing or flag.field.metadata["no_effect"]}
    for flag in FLAGS.values():
        metadata = flag.field.metadata
        assert metadata["help"].endswith((".", ";", ")")) and len(metadata["help"]) > 10, flag.field.name
        assert bool(metadata["only"]) == bool(metadata["otherwise"]), flag.field.name
        assert not metadata["only"] or flag.field.default in metadata["only"], flag.field.name


def test_every_flag_that_accepts_one_value_only_says_what_to_do():
    for name, flag in FLAGS.items():
        if (only := flag.field.metadata["only"]) and flag.allowed == "0 or 1":
            value = 0 if True in only else 1
            assert f"--{name} {value} is not available: {flag.field.metadata['otherwise']}" in problems(
                f"--{name}", value
            )


def test_the_page_of_flags_is_current():
    assert (ROOT / "docs" / "flags.md").read_text() == make_tables.flags_page(), "run `make docs`"


@pytest.fixture
def shown(capsys):
    """What ``--help`` prints."""
    with pytest.raises(SystemExit) as stopped:
        parse_args(["--help"])
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_help_names_every_flag(shown):
    assert [name for name in FLAGS if f"--{name}" not in shown] == [] and "--config" in shown
    assert [name for name in list_presets() if f"{name}," not in shown and f"{name}." not in shown] == []


def test_help_marks_what_is_not_in_this_version(shown):
    entries = re.split(r"^  (?=--)", shown, flags=re.M)
    marked = {entry.split()[0][2:] for entry in entries if "(not in this version)" in re.sub(r"\s+", " ", entry)}
    single = {name for name, flag in FLAGS.items() if len(flag.field.metadata["only"]) == 1}
    assert marked == single and {"global_token_shuffle", "moe_all_to_all_dispatcher"} <= marked


def test_the_version_is_printed_and_nothing_is_asked_for(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_args(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out == f"smp {smp.__version__}\n"


def test_help_begins_with_what_a_user_needs(shown):
    usage, _, rest = shown.partition("\n\nTrain, resume")
    assert re.search(r"^  try it +python -m smp.train --model llama_tiny --use_synthetic_data 1", usage, re.M)
    assert len(usage.splitlines()) <= 8 and usage.startswith("usage: python -m smp.train --model NAME --training_dir")
    titles = re.findall(r"^(\w+): (\w.*):$", rest, re.M)
    assert [name for name, _ in titles] == [*SECTIONS] and titles[0][0] == "model" and titles[-1][0] == "allocator"
    assert dict(titles)["data"] == "Sources of samples and their loading"
    assert "[X" not in shown and "  --checkpoint_dir X ..." in shown and "  --lr X  " in shown


def test_any_words_give_a_configuration_or_a_sentence():
    rng = random.Random(0)
    values = ["", "-1", "0", "1e9", "nan", "true", "-x", "--", "=", "a b", "None", "é", "[1]", "{}", "latest"]
    values.append("9" * 5000)
    for _ in range(400):
        words = []
        for _ in range(rng.randrange(1, 6)):
            name = rng.choice([*FLAGS, "confg", "", "x-y", "max"])
            words += [rng.choice(["--", "--", "--", "-"]) + name, *rng.choices(values, k=rng.randrange(3))]
        if any(word.startswith("-h") for word in words):
            continue
        try:
            parse_args(words)
        except UserError as error:
            assert "\n\n" not in str(error) and str(error).strip(), words


def test_help_names_the_optimizers(shown):
    assert "(adamw, adamw_8bit, muon; default adamw)" in " ".join(shown.split())
