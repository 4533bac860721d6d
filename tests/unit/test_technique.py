"""A new technique touches its own file and one line of the list: refusal, prediction and order follow."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

import train_lib
from smp.config import Settings, setting
from smp.errors import ConfigError, UserError
from smp.loss import shift_labels
from smp.mesh import lay_out
from smp.models.registry import FAMILIES
from smp.parallel import parallelize
from smp.parallel.activation_checkpoint import checkpointed_blocks
from smp.parallel.technique import Setup
from smp.plan.devices import device_row
from smp.plan.estimate import estimate
from smp.plan.records import GIB
from smp.plan.request import read_request
from tests import ballast
from tests.flags import SYNTHETIC, in_child, one_process, plan_of
from tests.job import LLAMA

OFFLOAD = ["--offload_activations", 1]  # on a CPU, without a directory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heavy(ballast.Config):
    ballast_mib: int = setting(2**30, "1 PiB in each block.")


@pytest.fixture
def listed(monkeypatch):
    """The technique is on the list, before sharding."""
    monkeypatch.setattr(parallelize, "TECHNIQUES", [*parallelize.TECHNIQUES[:-1], ballast, parallelize.TECHNIQUES[-1]])


def test_the_list_is_what_is_applied():
    names = [technique.__name__.removeprefix("smp.parallel.") for technique in parallelize.TECHNIQUES]
    *others, last = names
    assert others == ["context", "attention", "tensor", "activation_checkpoint", "compile_blocks", "offload", "loss"]
    assert last == "sharding"


def test_its_problems_are_refused_with_the_others(listed, tmp_path):
    with pytest.raises(ConfigError) as refused:
        plan_of(["--num_layers", 3, *OFFLOAD, "--global_batch_size", 2**25], tmp_path)
    found = [re.split(" needs | is too large", problem)[0] for problem in refused.value.problems]
    assert found == ["--offload_activations 1 on a CPU", "--ballast_mib 64", "the global batch of 33554432 samples"]
    plan_of(["--num_layers", 2], tmp_path).close()


def test_each_technique_takes_its_part_of_a_micro_batch_in_order(monkeypatch):
    """Whatever runs a step: the context's ranks cut first, and the loss chooses among what they have."""

    made_up = type("MadeUp", (), {"own_part": staticmethod(lambda batch, setup: seen.append(batch) or batch)})
    monkeypatch.setattr(parallelize, "TECHNIQUES", [*parallelize.TECHNIQUES, made_up])
    ids = torch.arange(16)[None]
    batch = {"input_ids": ids, "targets": shift_labels(ids), "position_ids": ids % 8, "longest_document": 8,
             "document_bounds": torch.tensor([0, 8, 16], dtype=torch.int32), "sample_ids": torch.arange(1)}  # fmt: skip
    family, seen = FAMILIES["llama"], []
    for cp, chosen in ((1, None), (2, [[0] * 7, [*range(7)]])):
        own = parallelize.own_part(dict(batch), Setup(family, lay_out(shard=2, cp=cp)))
        assert seen.pop() is own
        assert (own["chosen"].tolist() if "chosen" in own else None) == chosen  # the row's last token predicts nothing
    assert own["targets"].tolist() == [[1, 2, 3, 4, 13, 14, 15, -100]] and "document_bounds" not in own
    assert own["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert batch["targets"].shape == (1, 16)
    masked = {"input_ids": ids, "targets": torch.where(ids < 4, -100, batch["targets"])}
    own = parallelize.own_part(masked, Setup(family, lay_out()))
    assert own["chosen"][1].tolist() == [*range(4, 15)] and set(own) == {*masked, "chosen"}


@in_child  # where torch has cached the places of a mesh's first rank, others must not be forked
def test_its_cost_is_predicted(listed, tmp_path, capsys):
    words = [*LLAMA, *SYNTHETIC, "--output_dir", tmp_path / "run", "--dry_run", 1, "--dry_run_world_size", 4]
    assert train_lib.main([str(word) for word in words]) == 0
    table = dict(re.findall(r"^ *(\S[\w ]*?) +(\d+\.\d+) GiB$", capsys.readouterr().out, re.MULTILINE))
    assert float(table["ballast"]) == 2 * 64 / 1024
    assert float(table["sum"]) == pytest.approx(sum(map(float, table.values())) - float(table["sum"]), abs=5e-3)


def test_a_job_is_refused_for_its_cost(listed, tmp_path, monkeypatch):
    monkeypatch.setattr(ballast, "Config", Heavy)
    with pytest.raises(UserError, match=r"needs about 3\d{6}\.\d GiB in each process"):  # and free blocks of the heap
        plan_of([], tmp_path)
    request = read_request([*LLAMA, *SYNTHETIC], device_row("h100"), nodes=1, local=8)
    layout = next(request.layouts())
    assert estimate(request.shape, layout, request.row, local=8).memory > 2 * 2**20 * GIB


@pytest.mark.parametrize(("place", "sharded"), [(0, False), (4, False), (8, True)])
@in_child
def test_it_is_applied_in_its_place(monkeypatch, place, sharded):
    seen = []

    def apply(model, setup):
        seen.append((bool(checkpointed_blocks(model)), isinstance(model, FSDPModule)))
        ballast.apply(model, setup)

    made_up = type("MadeUp", (), {**vars(ballast), "apply": staticmethod(apply)})
    made_up.problems, made_up.cost = staticmethod(ballast.problems), staticmethod(ballast.cost)
    order = list(parallelize.TECHNIQUES)
    order.insert(place, made_up)
    monkeypatch.setattr(parallelize, "TECHNIQUES", order)
    with one_process([]) as built:
        assert seen == [(place > 1, sharded)]
        assert [block.ballast.numel() for block in built.model.model.layers] == [64, 64]


def test_settings_that_are_not_given_have_their_defaults():
    assert Settings()[ballast.Config].ballast_mib == 64
    assert Settings((ballast.Config(),)).changed(ballast_mib=3)[ballast.Config].ballast_mib == 3
    with pytest.raises(ValueError, match="no section has a setting ballast"):
        Settings((ballast.Config(),)).changed(ballast=3)
