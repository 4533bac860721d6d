"""The job trains adapters: small checkpoints of any layout, files of peft, and refusals."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import smp.cli
from smp.checkpoint import lora_merge
from smp.checkpoint.manifest import read_manifest
from smp.pretrained import read_box
from tests import experts
from tests.job import losses, run_job
from tests.reference import INDUCTOR, VOCABULARY, build_reference

RANK = 2


@pytest.fixture
def folder(tmp_path):
    """With a pretrained model, its data, and another model of the same shape."""
    reference = build_reference("llama_gqa", torch.float32)
    reference.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        reference.model.norm.weight.add_(1)
    reference.save_pretrained(tmp_path / "other")
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, reference.config.vocab_size, (2, 12), generator=generator).tolist() * 8
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return tmp_path


def flags(folder, run="run", base="base"):
    return [
        "--training_dir", folder / "rows.jsonl", "--data_cache_dir", folder / "cache", "--max_context_width", 12,
        "--hf_pretrained_model_name_or_dir", folder / base, "--output_dir", folder / run, "--train_batch_size", 2,
        "--lr", 0.05, "--lora_rank", RANK, "--lora_alpha", 8, "--lr_decay_iters", 8,
    ]  # fmt: skip


@pytest.mark.full
def test_adapters_are_trained_resumed_and_exported(folder, capsys):
    tp = ["--tensor_parallel_degree", 2, "--global_batch_size", 4]
    every = [*flags(folder), *tp, "--checkpoint_freq", 2]
    run_job(*every, "--max_steps", 4, world_size=2).succeeded()
    (checkpoint,) = (folder / "run" / "checkpoints").glob("*-2steps")
    names = {name for name in read_manifest(checkpoint).tensors if not name.startswith("rng")}
    assert names and all("lora_" in name for name in names)
    # At another layout, from the middle, to the end: as it was; then adapters alone, which any layout evaluates.
    more = ["--global_batch_size", 4, "--max_steps", 4, "--resume_from_checkpoint", checkpoint, "--save_final_model", 1]
    without_alpha = [*flags(folder, "resumed")[:-4], "--lr_decay_iters", 8]
    done = run_job(*without_alpha, *more, world_size=2).succeeded()
    assert "Taken from the checkpoint: --lora_alpha 8.0" in done.output and "Changed since" not in done.output
    assert losses(folder / "resumed") == pytest.approx(losses(folder / "run")[2:], rel=1e-5)
    assert losses(folder / "run")[3] < losses(folder / "run")[0]
    assert "of which" in done.output and "Final adapter" in done.output
    assert " frozen matmul weights (" in (folder / "resumed" / "config.yaml").read_text().splitlines()[0]
    final = folder / "resumed" / "final"
    assert not list(final.glob("model*.safetensors"))
    adapter, config = (
        load_file(final / "adapter_model.safetensors"),
        json.loads((final / "adapter_config.json").read_text()),
    )
    assert len(adapter) == 2 * 7 * 3 and (config["r"], config["lora_alpha"]) == (RANK, 8)
    assert config["base_model_name_or_path"] == str(folder / "base")
    checkpoint = folder / "resumed" / "checkpoints" / "latest"
    assert smp.cli.main(["export", str(checkpoint), str(folder / "exported")]) == 0
    again = load_file(folder / "exported" / "adapter_model.safetensors")
    assert again.keys() == adapter.keys() and all(torch.equal(again[key], adapter[key]) for key in adapter)
    assert (folder / "exported" / "adapter_config.json").read_bytes() == (final / "adapter_config.json").read_bytes()
    assert not any((each / "config.json").exists() for each in (final, folder / "exported"))
    assert smp.cli.main(["diff", "--values", str(checkpoint), str(final)]) == 0
    # Merged by a run whose step changes nothing: the base's weights and the adapter's product.
    start = [*flags(folder, "merged")[:-6], "--adapter_path", final, "--max_steps", 1, "--lr", 1e-30, "--min_lr", 0]
    run_job(*start, "--save_final_model", 1, "--save_merged_model", 1, world_size=2).succeeded()
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged" / "final").state_dict()
    base = AutoModelForCausalLM.from_pretrained(folder / "base").state_dict()
    for name, weight in base.items():
        key = f"base_model.model.{name.removesuffix('.weight')}.lora"
        delta = adapter[f"{key}_B.weight"] @ adapter[f"{key}_A.weight"] * 4 if f"{key}_A.weight" in adapter else 0
        assert torch.equal(merged[name], weight + delta), name
    check_merging(folder, capsys)


@pytest.mark.full
def test_adapters_of_a_mixture_are_merged_into_files_of_each_expert(folder):
    peft = pytest.importorskip("peft")
    experts.build("mixtral", torch.float32).save_pretrained(folder / "mixture")
    words = ["--max_steps", 2, "--expert_parallel_degree", 2, "--save_final_model", 1]
    done = run_job(*flags(folder, base="mixture"), *words, world_size=2).succeeded()
    assert done.output.count("The routed experts (down_proj, gate_up_proj) get none and are frozen.") == 1
    run, read = folder / "run", []
    with mock.patch.object(lora_merge, "read_box", lambda *given: read.append(given[1]) or read_box(*given)):
        assert smp.cli.main(["export", "--merge", str(run / "checkpoints" / "latest"), str(folder / "merged")]) == 0
    # Of the experts of a layer, as of no other parameter, a matrix of a file at a time.
    assert len(read) == 3 * 3 * experts.EXPERTS and {box[0].stop - box[0].start for box in read} == {1}
    base = AutoModelForCausalLM.from_pretrained(folder / "mixture", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, run / "final").merge_and_unload().state_dict()
    model, report = AutoModelForCausalLM.from_pretrained(
        folder / "merged", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()) and model.state_dict().keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in model.state_dict().items())
    merged, before = (load_file(folder / each / "model.safetensors") for each in ("merged", "mixture"))
    assert merged.keys() == before.keys()
    changed = {key for key, tensor in merged.items() if not torch.equal(tensor, before[key])}
    assert changed == {key for key in merged if "self_attn" in key}


@pytest.mark.full
def test_adapters_of_experts_resume_at_another_layout_and_are_merged(folder, capsys):
    peft = pytest.importorskip("peft")
    experts.build("gpt_oss", torch.float32).save_pretrained(folder / "mixture")
    words = [
        "--lora_target_parameters",
        "experts.gate_up_proj",
        "down_proj",
        "--global_batch_size",
        4,
        "--max_steps",
        4,
    ]
    every = [*words, "--expert_parallel_degree", 2, "--checkpoint_freq", 2, "--bf16", 0]
    run_job(*flags(folder, base="mixture"), *every, world_size=2).succeeded()
    (checkpoint,) = (folder / "run" / "checkpoints").glob("*-2steps")
    assert {"model.model.layers.1.mlp.experts.down_proj_lora_B"} < read_manifest(checkpoint).tensors.keys()
    resume = [*flags(folder, "resumed", base="mixture"), *words, "--save_final_model", 1]
    done = run_job(*resume, "--resume_from_checkpoint", checkpoint, world_size=2).succeeded()
    assert losses(folder / "resumed") == pytest.approx(losses(folder / "run")[2:], rel=1e-5)
    assert "The routed experts get adapters of down_proj, gate_up_proj." in done.output
    assert "Final model" in done.output and "as servers drop those of experts; --save_merged_model 0" in done.output
    latest = folder / "resumed" / "checkpoints" / "latest"
    capsys.readouterr()
    for words, name in (([], "merged"), (["--no-merge"], "alone")):
        assert smp.cli.main(["export", *words, str(latest), str(folder / name)]) == 0
        assert ("as servers drop those of experts; --no-merge" in capsys.readouterr().out) == (name == "merged")
    final, merged = (load_file(at / "model.safetensors") for at in (folder / "resumed" / "final", folder / "merged"))
    assert final.keys() == merged.keys() and all(torch.equal(final[key], merged[key]) for key in final)
    base = AutoModelForCausalLM.from_pretrained(folder / "mixture", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, folder / "alone").merge_and_unload().state_dict()
    ours = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(tensor, theirs[name], rtol=1e-5, atol=1e-7) for name, tensor in ours.items())
    changed = {
        key
        for key, tensor in load_file(folder / "mixture" / "model.safetensors").items()
        if not torch.equal(tensor, merged[key])
    }
    assert {key.rpartition(".")[2] for key in changed if "experts" in key} == {"down_proj", "gate_up_proj"}
    # Adapters that a run has exported are started from.
    given = [
        "--adapter_path",
        folder / "alone",
        "--max_steps",
        1,
        "--lr",
        1e-30,
        "--min_lr",
        0,
        "--save_merged_model",
        0,
    ]
    run_job(*flags(folder, "given", "mixture")[:-6], *given, "--save_final_model", 1, world_size=2).succeeded()
    first, again = (
        load_file(at / "adapter_model.safetensors") for at in (folder / "alone", folder / "given" / "final")
    )
    assert first.keys() == again.keys() and all(torch.equal(first[key], again[key]) for key in first)
    assert smp.cli.main(["diff", str(latest), str(folder / "alone")]) == 2
    assert "peft's files have the factors of experts joined" in capsys.readouterr().err


def check_merging(folder, capsys):
    """What is merged from a checkpoint is the final model of its run; the base is where it was, or where it is said."""

    def export(*words):
        capsys.readouterr()
        status = smp.cli.main(["export", str(folder / "merged" / "checkpoints" / "latest"), *map(str, words)])
        return status, capsys.readouterr().err

    assert export(folder / "a", "--merge", "--max_shard_size", "8KB") == (0, "")
    tensors = {key: value for file in (folder / "a").glob("*.safetensors") for key, value in load_file(file).items()}
    theirs = load_file(folder / "merged" / "final" / "model.safetensors")
    assert tensors.keys() == theirs.keys() and all(torch.equal(tensors[key], theirs[key]) for key in theirs)
    (folder / "base").rename(folder / "moved")
    for words, sentence in (
        (["--merge"], "is not there"),
        (["--merge", "--base", folder / "other"], "was made with other pretrained weights"),
        (["--base", folder / "moved"], "--base is of --merge"),
    ):
        status, error = export(folder / "b", *words)
        assert status == 2 and sentence in error and error.count("\n") == 1 and not (folder / "b").exists(), error
    assert export(folder / "b", "--merge", "--base", folder / "moved")[0] == 0
    tensors = load_file(folder / "b" / "model.safetensors")
    assert all(torch.equal(tensors[key], theirs[key]) for key in theirs)


def save_wide(folder):
    """A model whose weights can be stored in 4 bits."""
    LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                    num_attention_heads=4, max_position_embeddings=64, tie_word_embeddings=False)
    ).save_pretrained(folder / "wide")  # fmt: skip


def train_in_4_bits(folder, *words):
    """The losses of three steps."""
    run = "_".join(map(str, words)) or "plain"
    start = [*flags(folder, run, "wide"), "--global_batch_size", 4, "--qlora", 1, "--max_steps", 3]
    run_job(*start, *words, world_size=2).succeeded()
    return losses(folder / run)


@pytest.mark.full
def test_weights_in_4_bits_train_alike_however_they_are_computed_with(folder):
    pytest.importorskip("torchao")
    save_wide(folder)
    plain = train_in_4_bits(folder)
    assert plain[2] < plain[0]
    for words in (("--cpu_offload", 1), ("--distributed_backend", "smddp"), ("--delayed_param", 0)):
        assert train_in_4_bits(folder, *words) == pytest.approx(plain, rel=1e-5), words


@pytest.mark.full
@INDUCTOR
def test_inductor_compiles_layers_with_weights_in_4_bits(folder):
    pytest.importorskip("torchao")
    save_wide(folder)
    assert train_in_4_bits(folder, "--compile", 1) == pytest.approx(train_in_4_bits(folder), rel=1e-5)


@pytest.mark.full
def test_weights_in_4_bits_resume_and_merge(folder, capsys):
    pytest.importorskip("torchao")
    save_wide(folder)
    start = [*flags(folder, base="wide"), "--global_batch_size", 4, "--qlora", 1, "--lora_dropout", 0.25]
    run_job(*start, "--max_steps", 4, "--checkpoint_freq", 2, world_size=2).succeeded()
    (checkpoint,) = (folder / "run" / "checkpoints").glob("*-2steps")
    resume = [*flags(folder, "resumed", "wide"), "--max_steps", 4, "--resume_from_checkpoint", checkpoint]
    final = ["--save_final_model", 1, "--save_merged_model", 1]
    run_job(*resume, *start[-4:], "--global_batch_size", 4, *final, world_size=2).succeeded()
    assert losses(folder / "resumed") == losses(folder / "run")[2:]
    refused = run_job(*flags(folder, "a", "wide"), *resume[-4:], world_size=1)
    assert refused.statuses == [2] and "was made with other pretrained weights than" in refused.output
    source = folder / "resumed" / "checkpoints" / "latest"
    assert smp.cli.main(["export", "--merge", str(source), str(folder / "merged")]) == 0
    theirs, mine = (load_file(at / "model.safetensors") for at in (folder / "resumed" / "final", folder / "merged"))
    base = load_file(folder / "wide" / "model.safetensors")
    assert mine.keys() == theirs.keys() == base.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)
    name = "model.layers.1.mlp.up_proj.weight"
    assert not torch.equal(mine[name], base[name])


@pytest.mark.full
@pytest.mark.parametrize("beside", [("--lora_train_tokens", 3, 90), ("--lora_modules_to_save", "lm_head", "norm")])
def test_what_is_trained_beside_adapters_resumes_and_is_exported(folder, beside):
    """At another layout; the checkpoint's export is the final adapter, and merged the same model."""
    run_job(*flags(folder), *beside, "--tensor_parallel_degree", 2, "--global_batch_size", 4, "--checkpoint_freq", 2,
            "--max_steps", 4, world_size=2).succeeded()  # fmt: skip
    (checkpoint,) = (folder / "run" / "checkpoints").glob("*-2steps")
    names = {name.removeprefix("model.") for name in read_manifest(checkpoint).tensors if name.startswith("model.")}
    own = {name for name in names if ".lora_" not in name}
    tokens = {"model.embed_tokens.trained_tokens", "lm_head.trained_tokens"}
    assert own == tokens if "tokens" in beside[0] else {"lm_head.weight", "model.norm.weight"} < own
    more = ["--global_batch_size", 4, "--max_steps", 4, "--resume_from_checkpoint", checkpoint, "--save_final_model", 1]
    run_job(*flags(folder, "resumed"), *beside, *more, world_size=2).succeeded()
    assert losses(folder / "resumed") == pytest.approx(losses(folder / "run")[2:], rel=1e-5)
    latest, final = folder / "resumed" / "checkpoints" / "latest", folder / "resumed" / "final"
    assert smp.cli.main(["export", str(latest), str(folder / "exported")]) == 0
    first, again = (load_file(at / "adapter_model.safetensors") for at in (final, folder / "exported"))
    assert first.keys() == again.keys() and all(torch.equal(first[key], again[key]) for key in first)
    run_job(*flags(folder, "merged"), *beside, *more, "--save_merged_model", 1, world_size=2).succeeded()
    assert smp.cli.main(["export", "--merge", str(latest), str(folder / "again")]) == 0
    theirs, mine = (load_file(at / "model.safetensors") for at in (folder / "merged" / "final", folder / "again"))
    base = load_file(folder / "base" / "model.safetensors")
    assert mine.keys() == theirs.keys() == base.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)
    rows = (mine["lm_head.weight"] != base["lm_head.weight"]).any(1).nonzero().flatten().tolist()
    assert rows == ([3, 90] if "tokens" in beside[0] else list(range(VOCABULARY)))
    # The adapter is started from.
    given = [*flags(folder, "given")[:-6], "--adapter_path", final, "--max_steps", 1, "--lr", 1e-30, "--min_lr", 0]
    run_job(*given, "--save_final_model", 1, world_size=2).succeeded()
    again = load_file(folder / "given" / "final" / "adapter_model.safetensors")
    assert first.keys() == again.keys() and all(torch.equal(first[key], again[key]) for key in first)


@pytest.mark.full
def test_what_cannot_be_used_is_one_sentence(folder):
    start = [*flags(folder), "--max_steps", 2, "--global_batch_size", 4, "--checkpoint_freq", 2]
    run_job(*start, "--save_final_model", 1, world_size=1).succeeded()
    (checkpoint,) = (folder / "run" / "checkpoints").glob("*-2steps")
    final = folder / "run" / "final"
    resume = ["--max_steps", 4, "--resume_from_checkpoint", checkpoint]
    for words, sentence in (
        ([*flags(folder, "a", "other"), *resume], "was made with other pretrained weights than"),
        ([*flags(folder, "b"), *resume, "--lora_rank", 3], "has adapters of rank 2, and --lora_rank is 3"),
        (
            [*flags(folder, "c"), "--lora_target_modules", "q_prj", "--max_steps", 1],
            "is the end of no linear layer's name",
        ),
        (
            [*flags(folder, "d"), "--adapter_path", final, "--lora_rank", 3],
            "--lora_rank 3 is not that of --adapter_path",
        ),
        ([*flags(folder, "e"), "--adapter_path", folder / "base"], "no adapter that can be read"),
        ([*flags(folder, "i"), "--lora_dropout", 0.1, "--compile", 1], "--compile 1 cannot compile the draws of"),
        (["--model", folder / "base", *flags(folder, "g")[:4], "--save_merged_model", 1], "set --lora_rank"),
        ([*flags(folder, "h")[:4], "--hf_pretrained_model_name_or_dir", final], "by --adapter_path"),
    ):
        refused = run_job(*words, world_size=1)
        assert refused.statuses == [2] and sentence in refused.output, refused.output
        assert "Traceback" not in refused.output
