"""Groups of parameters, the state that a checkpoint is read into, and an optimizer that is made up."""

import json
import os
import pathlib

import pytest
import torch

from smp.errors import ConfigError, UserError
from smp.mesh import lay_out
from smp.models.parameters import parameter_table
from smp.optim.config import OptimConfig
from smp.optim.optimizers import build_optimizer, find_problems
from smp.train.lr_schedule import LRConfig, set_lr
from tests.job import LLAMA, run_job
from tests.reference import build_reference


def test_only_matrices_decay():
    for name in ("llama_gqa", "mistral", "gpt_neox"):
        model = build_reference(name, torch.float32)
        optimizer = build_optimizer(model, OptimConfig(weight_decay=0.3, beta1=0.8, beta2=0.9), lr=0.1)
        decayed, rest = optimizer.param_groups
        assert (decayed["weight_decay"], rest["weight_decay"]) == (0.3, 0.0)
        assert decayed["betas"] == (0.8, 0.9) and decayed["fused"]
        names = {id(p): n for n, p in model.named_parameters()}
        assert all("norm" in names[id(p)] or names[id(p)].endswith("bias") for p in rest["params"])
        assert not any("norm" in names[id(p)] or names[id(p)].endswith("bias") for p in decayed["params"])
        assert len(decayed["params"]) + len(rest["params"]) == len(names)


def test_allocated_state_is_what_a_first_step_starts_from():
    first, second = (build_reference("llama_tied", torch.float32) for _ in range(2))
    optimizers = [build_optimizer(model, OptimConfig(), lr=0.1) for model in (first, second)]
    for group in optimizers[1].param_groups:
        for parameter in group["params"]:
            optimizers[1].state[parameter] = optimizers[1].initial_state(parameter, group)
    for model, optimizer in zip((first, second), optimizers, strict=True):
        model(torch.arange(8)[None]).logits.sum().backward()
        optimizer.step()
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert optimizers[0].state[mine].keys() == optimizers[1].state[theirs].keys()


def test_adamw_is_torchs_to_the_last_bit():
    first, second = (build_reference("llama_tied", torch.float32) for _ in range(2))
    mine = build_optimizer(first, OptimConfig(), lr=0.1)
    groups = [{"params": [p for p in second.parameters() if (p.dim() < 2) is vector], "weight_decay": decay}
              for vector, decay in ((False, 0.2), (True, 0.0))]  # fmt: skip
    theirs = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), fused=True)
    skipped = 2
    for step in range(4):
        for model in (first, second):
            model(torch.arange(8)[None] + step).logits.square().sum().backward()
        mine.step(skip=torch.tensor(step == skipped))
        if step != skipped:
            theirs.step()
        mine.zero_grad(), theirs.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def groups_file(folder, *entries):
    path = folder / "groups.json"
    path.write_text(json.dumps(entries))
    return str(path)


def test_the_first_group_that_has_a_parameter_counts(tmp_path):
    model = build_reference("llama_gqa", torch.float32)
    path = groups_file(
        tmp_path,
        {"pattern": r"layers\.0\.", "lr_factor": 0.5},
        {"pattern": "norm", "weight_decay": 0.25},
        {"pattern": "embed_tokens|lm_head", "lr_factor": 2, "weight_decay": 0},
    )
    optimizer = build_optimizer(model, OptimConfig(param_groups=path), lr=0.1)
    set_lr(optimizer, LRConfig(lr=0.1, warmup=0.0, lr_decay_style="constant"), 5, max_steps=10)
    found = {id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    wanted = {
        "model.layers.0.mlp.up_proj.weight": (0.05, 0.2),
        "model.layers.0.input_layernorm.weight": (0.05, 0.0),
        "model.layers.1.input_layernorm.weight": (0.1, 0.25),
        "model.norm.weight": (0.1, 0.25),
        "model.embed_tokens.weight": (0.2, 0.0),
        "model.layers.1.mlp.up_proj.weight": (0.1, 0.2),
    }
    assert {name: found[id(model.get_parameter(name))] for name in wanted} == wanted
    assert len(found) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([{"pattern": "nowhere"}], "group 1: no trained parameter is left for pattern 'nowhere' .they are named like"),
        ([{"pattern": "."}, {"pattern": "norm"}], "group 2: .* .an earlier group has all."),
        (
            [{"pattern": "norm", "optimizer": "sgd"}],
            "--param_groups .*groups.json: group 1: optimizer must be one of adamw.*got 'sgd'",
        ),
        ([{"pattern": "norm", "optimizer": "muon"}], "group 1: muon takes none of its parameters, such as .*norm"),
        ([{"pattern": "norm"}, {"pattern": "norm"}], "group 2: .* .an earlier group has all."),
        ([{"pattern": "("}], "is no regular expression"),
        ([{"lr_factor": 2}], "with a pattern, got"),
        ([{"pattern": "norm", "lr": 2}], "must be a mapping of pattern, lr_factor, weight_decay, optimizer"),
        ([{"pattern": "norm", "lr_factor": -1}], "lr_factor must be a number from 0 to 1000, got -1"),
        ([], "must be a list of groups"),
    ],
)
def test_groups_that_are_none_are_refused(entries, said, tmp_path):
    table = parameter_table(build_reference("llama_gqa", torch.float32))
    with pytest.raises(UserError, match=said):
        if problems := find_problems(table, lay_out(), OptimConfig(param_groups=groups_file(tmp_path, *entries))):
            raise ConfigError(problems)


def test_settings_of_muon_need_parameters_of_it(tmp_path):
    table = parameter_table(build_reference("llama_gqa", torch.float32))

    def found(**flags):
        return find_problems(table, lay_out(), OptimConfig(muon_momentum=0.5, **flags))

    refused = ["--muon_momentum needs --optimizer muon: set it, or leave --muon_momentum out"]
    assert found() == found(param_groups=groups_file(tmp_path, {"pattern": "mlp", "lr_factor": 2})) == refused
    (tmp_path / "other").mkdir()
    assert found(param_groups=groups_file(tmp_path / "other", {"pattern": "mlp", "optimizer": "muon"})) == []
    assert found(optimizer="muon") == []


def _apart(rank: int) -> None:
    """Give each rank a directory, as hosts without a shared one have."""
    os.mkdir(f"host{rank}")
    os.chdir(f"host{rank}")
    groups_file(pathlib.Path(), {"pattern": "norm", "lr_factor": 1 + rank})


def test_ranks_that_read_other_groups_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--use_synthetic_data", 1, "--max_steps", 1, "--output_dir", tmp_path / "run"]
    refused = run_job(*LLAMA, *words, "--param_groups", "groups.json", world_size=2, prepare=_apart)
    assert refused.statuses == [2, 2] and "the groups of --param_groups" in refused.output, refused.output
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_job_and_a_plan_refuse_them_and_write_nothing(tmp_path):
    words = ["--param_groups", groups_file(tmp_path, {"pattern": "nowhere"}), "--output_dir", tmp_path / "run"]
    refused = run_job(*LLAMA, "--use_synthetic_data", 1, "--max_steps", 1, *words)
    assert refused.statuses == [2] and "for pattern 'nowhere'" in refused.output and "Traceback" not in refused.output
    assert not (tmp_path / "run").exists()
