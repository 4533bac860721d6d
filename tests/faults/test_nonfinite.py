"""A loss or gradient that is not finite: no rank makes the update, all stop or skip alike, and it is written down."""

from __future__ import annotations

import json
import math

import pytest
import torch

from smp.faults.nonfinite import spread_nonfinite
from smp.parallel.grad_norm import clip_grad_norm_
from smp.train import start
from smp.train import step as one_step
from tests.faults.jobs import JOB, checkpoints
from tests.job import LLAMA, read_metrics, run_job, tensors

LAYOUTS = {
    "full": ["--sharding_strategy", "full_shard"],
    "replicated": ["--sharding_strategy", "no_shard"],
    "tensor parallel": ["--tensor_parallel_degree", 2],
    "accumulated": ["--gradient_accumulation_steps", 2, "--defer_gradient_sync", 1],
}


def broken_loss(value: float, *, at: set[int], rank: int = 1):
    """``prepare``: the loss of one rank is ``value`` in some forward passes of it, counted from 1."""

    def prepare(own: int) -> None:
        inner, count = one_step.forward, 0

        def forward(model, microbatch, device):
            nonlocal count
            count += 1
            loss = inner(model, microbatch, device)
            return loss + value if own == rank and count in at else loss

        one_step.forward = forward

    return prepare


def broken_gradient(own: int) -> None:
    """``prepare``: one element of one rank's gradient is infinite in the second step, before the norm."""
    inner, count = one_step.clip_grad_norm_, 0

    def clip(model, bound, **options):
        nonlocal count
        count += 1
        if own == 1 and count == 2:
            weight = model.get_parameter("model.layers.1.mlp.down_proj.weight")
            weight.grad.to_local().view(-1)[0] = math.inf
        return inner(model, bound, **options)

    one_step.clip_grad_norm_ = clip


def record(run) -> list[dict]:
    return [json.loads(line) for line in (run / "nonfinite.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("value", "layout"),
    [
        (math.inf, "full"),
        (math.nan, "replicated"),
        (math.inf, "tensor parallel"),
        *(pytest.param(math.nan, layout, marks=pytest.mark.slow) for layout in ("full", "tensor parallel")),
        *(pytest.param(math.inf, layout, marks=pytest.mark.slow) for layout in ("replicated", "accumulated")),
    ],
)
@pytest.mark.smoke
def test_the_loss_of_one_rank_stops_all_before_the_update(value, layout, tmp_path):
    job = [*JOB, *LAYOUTS[layout], "--checkpoint_freq", 1, "--num_kept_checkpoints", 9]
    per_step = 2 if layout == "accumulated" else 1
    # Ranks of one tensor-parallel group have one loss.
    ranks = {0, 1} if layout == "tensor parallel" else {1}

    def prepare(own: int) -> None:
        broken_loss(value, at={2 * per_step + 1}, rank=own if own in ranks else -1)(own)

    outcome = run_job(*job, "--max_steps", 5, "--output_dir", tmp_path / "run", world_size=2, prepare=prepare)
    assert outcome.statuses == [1, 1] and "Traceback" not in outcome.output, outcome.output
    assert checkpoints(tmp_path / "run") == [1, 2]
    [line] = record(tmp_path / "run")
    assert (line["step"], line["action"], line["grad_norm"]) == (3, "stop", "nan")
    assert {each["rank"] for each in line["ranks"] if isinstance(each["loss"], str)} == ranks
    said = [text for text in outcome.output.splitlines() if text.startswith("error: ")]
    assert len(said) == 1 and "Step 3: the loss is not finite on rank" in said[0]
    ids = line["ranks"][1]["sample_ids"]
    assert ids and f"rank 1 (samples {', '.join(map(str, ids))})" in said[0] and line["lr"] > 0


def test_a_gradient_of_one_rank_names_its_parameter(tmp_path):
    run = tmp_path / "run"
    outcome = run_job(*JOB, "--max_steps", 4, "--output_dir", run, world_size=2, prepare=broken_gradient)
    assert outcome.statuses == [1, 1], outcome.output
    name = "model.layers.1.mlp.down_proj.weight"
    assert f"Step 2: the loss is finite and the gradients are not, of {name} (rank 0: samples " in outcome.output
    [line] = record(run)
    assert [each["parameters"] for each in line["ranks"]] == [[], [name]]
    assert line["grad_norm"] == "inf" and len(read_metrics(run)) == 1


def test_a_step_is_left_out_and_the_rest_is_as_without_it(tmp_path):
    """The parameters after the skipped step are those before it, and the run goes on with the next data."""
    run = tmp_path / "run"
    words = [*JOB, "--nonfinite", "skip", "--checkpoint_freq", 1, "--num_kept_checkpoints", 9, "--output_dir", run]
    prepare = broken_loss(math.nan, at={2, 4})
    outcome = run_job(*words, "--max_steps", 5, world_size=2, prepare=prepare).succeeded()
    assert [line["step"] for line in read_metrics(run)] == [1, 2, 3, 4, 5]
    assert [line["loss"] == "nan" for line in read_metrics(run)] == [False, True, False, True, False]
    for before, after, equal in ((1, 2, True), (2, 3, False), (3, 4, True)):
        first, second = tensors(run, before), tensors(run, after)
        assert first.keys() == second.keys()
        trained = [key for key in first if "rng" not in key]
        assert all(torch.equal(first[key], second[key]) for key in trained) == equal
    assert all(torch.isfinite(value).all() for value in tensors(run, 5).values())
    assert "The update was left out, 2 of 10 that may be" in outcome.output
    assert [(line["step"], line["action"]) for line in record(run)] == [(2, "skip"), (4, "skip")]
    # The count is the run's: a resumed one has two of its three left out already.
    resumed = [*words, "--max_steps", 9, "--resume_from_checkpoint", "latest", "--nonfinite_budget", 3]
    second = run_job(*resumed, world_size=2, prepare=broken_loss(math.nan, at={1, 3}))
    assert second.statuses == [1, 1], second.output
    assert "The update was left out, 3 of 3 that may be" in second.output
    assert "4 updates have not been finite, and --nonfinite_budget 3 may be left out" in second.output
    assert [(line["step"], line["action"]) for line in record(run)][2:] == [(6, "skip"), (8, "stop")]


def test_weights_that_are_not_finite_stop_at_the_first_step(tmp_path):
    def prepare(rank: int) -> None:
        inner = start.restore

        def load(path, saved, model, *args, **kwargs):
            inner(path, saved, model, *args, **kwargs)
            with torch.no_grad():
                next(iter(model.parameters())).to_local().view(-1)[:64] = math.nan

        start.restore = load

    words = [*JOB, "--output_dir", tmp_path / "run"]
    run_job(*words, "--max_steps", 2, world_size=2).succeeded()
    resumed = [*words, "--max_steps", 4, "--resume_from_checkpoint", "latest"]
    outcome = run_job(*resumed, world_size=2, prepare=prepare)
    assert outcome.statuses == [1, 1] and "Step 3: the loss is not finite" in outcome.output, outcome.output
    said = "The parameters themselves are not finite, before the update: model.embed_tokens.weight: take pretrained"
    assert said in outcome.output and "--lr" not in outcome.output, outcome.output
    assert checkpoints(tmp_path / "run") == [2]


def test_one_process_stops_alike(tmp_path):
    prepare = broken_loss(math.inf, at={1}, rank=0)
    outcome = run_job(
        *LLAMA, "--use_synthetic_data", 1, "--max_steps", 2, "--output_dir", tmp_path / "run", prepare=prepare
    )
    assert outcome.statuses == [1] and "Step 1: the loss is not finite on rank 0" in outcome.output


def test_a_finite_loss_stays_bit_for_bit_what_it_is():
    for value in (0.0, 1e-38, 1.1, 3e38):
        loss = torch.tensor(value, requires_grad=True)
        spread_nonfinite(loss).backward()
        assert torch.equal(spread_nonfinite(loss), loss) and loss.grad == 1
    for value in (math.inf, -math.inf, math.nan):
        loss = torch.tensor(value, requires_grad=True)
        spread_nonfinite(loss).backward()
        assert spread_nonfinite(loss).isnan() and loss.grad.isnan()


def test_gradients_are_not_scaled_by_a_norm_that_is_not_finite():
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 4.0]), torch.tensor([math.inf, 1.0])
    assert clip_grad_norm_(parameters, 1.0).isinf()
    assert parameters[0].grad.tolist() == [3.0, 4.0] and parameters[1].grad.tolist() == [math.inf, 1.0]
