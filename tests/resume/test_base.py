"""A checkpoint of adapters goes on beside the weights it was made with: all their bytes are compared."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import smp
import smp.cli
from smp.checkpoint import base
from smp.checkpoint.manifest import read_manifest
from smp.errors import UserError
from smp.models import full_digest
from smp.models.added import Encoded, encode_parameter
from smp.models.full_digest import FullDigest
from tests.distributed import run_distributed
from tests.job import run_job
from tests.resume.test_lora_job import flags
from tests.unit.test_full_digest import edit


def build(seed=0):
    """A model of more bytes than are sampled."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=8192, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                    max_position_embeddings=64)
    )  # fmt: skip


def script(weights):
    """A checkpointer of a model with adapters beside pretrained weights."""
    model = smp.load_pretrained(smp.parallelize(smp.lora(build(), 2)), weights)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return model, smp.Checkpointer(weights.parent / "checkpoints", model, optimizer)


def check(weights):
    smp.init()
    model, checkpoints = script(weights)
    saved = read_manifest(checkpoints.save(1)).model
    assert "base" in saved and "base_full" not in saved  # not known yet
    base.base_of(model).full.find()
    digest = read_manifest(checkpoints.save(2)).model["base_full"]
    assert digest == FullDigest(weights).value
    edit(weights)
    model, checkpoints = script(weights)
    assert checkpoints.load().step == 2 and not base.is_other_base(model)
    base.base_of(model).full.find()
    assert base.is_other_base(model)
    with pytest.raises(UserError, match=r"with other pretrained weights than .*, as the digest of all their bytes"):
        checkpoints.save(3)
    # From now on it is known before the first step; a checkpoint without it is as valid as it was.
    model, checkpoints = script(weights)
    with pytest.raises(UserError, match="model-2steps was made with other pretrained weights than"):
        checkpoints.load()
    assert checkpoints.load(weights.parent / "checkpoints" / "model-1steps").step == 1


def test_a_script_is_refused_weights_that_were_edited(tmp_path):
    build().save_pretrained(tmp_path / "weights")
    by_hand = mock.patch.object(FullDigest, "begin", return_value=False)
    kept = mock.patch.object(full_digest, "cache_folder", lambda name: tmp_path / name)
    with by_hand, kept:
        run_distributed(check, tmp_path / "weights", world_size=1)


def of_no_files(seed, folder):
    """A checkpointer of a model whose frozen weights are in another form, as those in 4 bits are."""
    model = smp.parallelize(smp.lora(build(seed), 2))
    name = "model.layers.0.mlp.up_proj.weight"
    encode_parameter(model, name, Encoded("x", (64, 64), torch.Tensor.float, torch.Tensor.float))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return smp.Checkpointer(folder, model, optimizer)


def check_of_no_files(folder):
    smp.init()
    checkpoints = of_no_files(0, folder)
    assert bool(checkpoints.load()) == (dist.get_world_size() == 2)  # of one process
    path = checkpoints.save(dist.get_world_size())
    assert not any("up_proj.weight" in name or "embed" in name for name in read_manifest(path).tensors)
    with pytest.raises(UserError, match="steps was made with other frozen weights than the model has"):
        of_no_files(1, folder).load()


def test_frozen_weights_of_no_files_are_compared_too(tmp_path):
    for world_size in (1, 2):
        run_distributed(check_of_no_files, tmp_path, world_size=world_size)


@pytest.mark.full
def test_a_job_ends_when_the_background_has_found_other_weights(tmp_path, capsys):
    build().save_pretrained(tmp_path / "base")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input_ids": list(range(12))}) + "\n")
    FullDigest(tmp_path / "base").find()
    run_job(*flags(tmp_path), "--max_steps", 2, world_size=1).succeeded()
    checkpoint = tmp_path / "run" / "checkpoints" / "latest"
    assert smp.cli.main(["verify", str(checkpoint)]) == 0
    edit(tmp_path / "base")
    start = [*flags(tmp_path), "--max_steps", 10**6, "--resume_from_checkpoint", "latest"]
    for sentence in (
        "as the digest of all their bytes shows",
        "which it does not contain",
    ):  # in the background, before
        ended = run_job(*start, world_size=2)
        assert set(ended.statuses) == {2} and sentence in ended.output and "Traceback" not in ended.output
    assert checkpoint.resolve().name.endswith("-2steps")
    for words in (["export", "--merge", checkpoint, tmp_path / "merged"], ["verify", checkpoint]):
        status, said = smp.cli.main([*map(str, words)]), capsys.readouterr()
        assert status and "was made with other pretrained weights than" in said.out + said.err, words
