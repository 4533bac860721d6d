"""`--plan 1`: the plan beside the run, what it was wrong by, and that the run is the same without it."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest

import smp.train.__main__ as job
from smp.errors import UserError
from smp.plan import document, ledger
from smp.plan.records import LayoutPlan, Moment, RankMemory, StepTime
from smp.train import planned
from tests.flags import SYNTHETIC, check, plan_of
from tests.job import LLAMA, losses, run_job

ROW = {"name": "cpu", "source": "measured", "date": "2026-11-23", "factor": 1.0}
MEMORY = RankMemory(0, Moment("forward", {"activations": 900, "gradients": 100}), {}, None, 0, None)


def prediction(seconds=2.0, memory=MEMORY, row=ROW):
    step = StepTime(seconds, seconds, seconds, {}, 0, 0, "")
    layout = document.layout_entry(LayoutPlan("mesh", memory, step, 1, "blocks"))
    return {"schema": document.SCHEMA, "device_row": row, "layouts": [layout]}


def line(measured=2.5, **changed):
    values = {"categories": {"activations": 1000, "gradients": 0, "logits": 0}, "allocated": None, "reserved": None}
    plan = prediction(row={**ROW, **changed.pop("row", {})})
    return ledger.entry(
        plan, **{**values, **changed}, resident=None, step_seconds=measured, about={"processes": 2, "model": "x"}
    )


def test_errors_are_shares_of_what_was_measured():
    found = line()
    assert found["errors"]["memory"] == {"predicted": 1000, "measured": 1000, "error": 0.0}
    assert found["errors"]["step"]["error"] == pytest.approx(-0.2)
    assert set(found["categories"]) == {"activations", "gradients"}
    assert found["categories"]["gradients"]["error"] is None  # there were none
    assert ledger.sentence(found) == "memory +0.0 %, step -20.0 %"
    on_gpu = line(categories=None, allocated=1250, reserved=2048)
    assert ledger.sentence(on_gpu) == "memory -20.0 %, step -20.0 %"  # nothing was predicted of what is reserved
    assert json.loads(document.as_text(found)) == found


def test_a_ledger_is_tabulated_in_order_of_its_paths(tmp_path):
    for name, seconds in (("b", 2.5), ("a", 2.0), ("c/d", 1.0)):
        (tmp_path / name).mkdir(parents=True)
        document.write(line(seconds), tmp_path / name / ledger.ERROR)
    lines = ledger.read([tmp_path])
    table = ledger.rows(lines)
    assert [row[0] for row in table] == ["run", "a", "b", "d", "median, without sign"]
    assert table[2][1:] == ["cpu", "2", "+0.0 %", "-", "-20.0 %", "2 s", "2.5 s"]
    assert table[-1][3:6] == ["0.0 %", "-", "20.0 %"]
    identity = {name: ROW[name] for name in ("name", "source", "date")}
    assert ledger.ratios([each for _, each in lines], identity) == [1.0, 1.25, 0.5]
    assert ledger.ratios([each for _, each in lines], {**identity, "date": "2026-11-24"}) == []
    # What an earlier factor has corrected is not corrected twice.
    assert ledger.ratios([line(2.5, row={"factor": 0.8})], identity) == [pytest.approx(1.5625)]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2}', '{"schema": 1, "errors": {}, "device_row": {}}'])
def test_what_is_no_ledger_is_refused(text, tmp_path):
    (tmp_path / ledger.ERROR).write_text(text)
    with pytest.raises(UserError, match=r"plan_error.json is no ledger of a plan"):
        ledger.read([tmp_path])
    with pytest.raises(UserError, match="is no directory"):
        ledger.read([tmp_path / "none"])


def test_the_planner_is_given_up(monkeypatch, tmp_path, caplog):
    plan = plan_of(["--max_steps", 1], tmp_path)

    def by(code, seconds):
        monkeypatch.setattr(planned, "planner_command", lambda job: [sys.executable, "-c", code])
        return planned.predict(plan, seconds=seconds)

    said = []
    monkeypatch.setattr(planned.logger, "info", lambda text, *values: said.append(text % values))
    assert by("import time; time.sleep(100)", 0.2) is None
    assert by("raise SystemExit('error: no such model')", 60) is None
    assert by("print('[]')", 60) is None
    assert by('print(\'{"layouts": [{"memory": {"rank": 0}}]}\')', 60) is not None
    uneven = dataclasses.replace(plan, launch=dataclasses.replace(plan.launch, world_size=3, local_world_size=2))
    assert planned.predict(uneven) is None and "as many processes each" in said.pop()
    monkeypatch.setattr(sys, "executable", "/absent/python")
    assert by("", 60) is None and said.pop() == "No plan: its process cannot be started (No such file or directory)."
    assert len(said) == 3 and "longer than 0.2 s" in said[0] and said[1] == "No plan: no such model"


def test_the_planner_plans_the_job_as_it_is(tmp_path):
    plan = plan_of(["--plan", 1, "--train_batch_size", 4, "--checkpoint_freq", 5, "--lr", "0.001"], tmp_path)
    words = planned.planner_command(plan)
    text = " ".join(words)
    assert "--search 0 --nodes 1 --gpus_per_node 1 --device cpu" in text
    assert "--train_batch_size 4" in text and "--checkpoint_freq 5" in text and "--use_synthetic_data 1" in text
    assert "--plan" not in words and "--output_dir" not in words and "--tensor_parallel_degree" not in words


def run(run_dir, *words, world_size=1, steps):
    def plans(rank):
        job.predict = lambda plan: prediction(seconds=0.01)

    flags = [*LLAMA, *SYNTHETIC, "--max_steps", steps, "--attn_pdrop", 0.1, "--checkpoint_freq", steps]
    return run_job(*flags, "--output_dir", run_dir, *words, prepare=plans, world_size=world_size)


def files_of(run_dir, steps):
    """Digests of what a checkpoint holds: parameters, optimizer state, generators."""
    (manifest,) = run_dir.glob(f"checkpoints/*-{steps}steps/manifest.json")
    return json.loads(manifest.read_text())["files"]


@check("plan")
@pytest.mark.full
def test_a_run_is_the_same_with_its_plan(tmp_path):
    """Over the shared memory of smddp; only one of its processes is profiled. It goes on after step 20."""
    run(tmp_path / "plain", world_size=2, steps=22).succeeded()
    outcome = run(tmp_path / "planned", "--plan", 1, world_size=2, steps=22).succeeded()
    assert losses(tmp_path / "plain") == losses(tmp_path / "planned")
    assert files_of(tmp_path / "plain", 22) == files_of(tmp_path / "planned", 22)
    assert not (tmp_path / "plain" / ledger.PLAN).exists()
    assert json.loads((tmp_path / "planned" / ledger.PLAN).read_text()) == prediction(seconds=0.01)
    found = json.loads((tmp_path / "planned" / ledger.ERROR).read_text())
    assert found["steps"] == 16 and found["errors"]["step"]["measured"] > 0
    assert found["categories"]["parameters"]["measured"] > 0
    assert f"plan: {ledger.sentence(found)}" in outcome.output
