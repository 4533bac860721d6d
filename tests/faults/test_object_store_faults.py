"""Jobs whose checkpoints go to an S3 server: kills in uploads and downloads; a server that fails, is slow or away."""

from __future__ import annotations

import re
import threading

import pytest

from benchmarks import upload_kill_trials
from benchmarks.upload_kill_trials import PHASES, Bench, Trial, bench, damage, job, prepared
from tests.job import losses, run_job, running_job
from tests.s3 import Fault, s3_port, share  # noqa: F401  a fixture


@pytest.fixture(scope="module")
def trials(s3_port, tmp_path_factory):  # noqa: F811
    """A bench of trials."""
    with bench(tmp_path_factory.mktemp("machines"), s3_port) as found:
        yield found


@pytest.mark.parametrize(
    "trial",
    [
        Trial("in a file", 2, "middle", 1, None, 2),
        pytest.param(Trial("in the manifest's PUT", 4, "applied", 0, 0, 1), marks=pytest.mark.slow),
        pytest.param(Trial("retention", 4, "before", 1, None, 1), marks=pytest.mark.slow),
        Trial("download at resume", 4, "answering", 0, None, 2),
    ],
    ids=lambda trial: trial.phase,
)
def test_a_new_machine_goes_on_after_a_kill(trials: Bench, trial):
    assert trials.run(trial) == "kept"


@pytest.mark.slow
def test_kills_in_all_phases_lose_nothing():
    assert upload_kill_trials.main(["--trials", str(5 * len(PHASES)), "--seed", "1"]) == 0


def manifests(trials: Bench) -> list[int]:
    """Steps whose manifests were acknowledged, in order."""
    keys = trials.proxy.answered("put", "manifest.json")
    return [int(re.search(r"-(\d+)steps/", key)[1]) for key in keys]


def logged(output: str) -> int:
    """The last step that a job has logged."""
    return max((int(step) for step in re.findall(r"Batch (\d+) Loss", output)), default=0)


def test_training_does_not_wait_for_a_store_that_does_not_answer(trials: Bench):
    """All steps are done and all checkpoints saved while the first upload hangs; then the newest is uploaded."""
    server, run = trials.bucket(), trials.fresh()
    held = Fault(cut="before", hold=threading.Event())
    trials.proxy.rules = [lambda r: held if not held.hold.is_set() and "-2steps/" in r.key else None]
    try:
        with running_job(*job(server, run), world_size=2, prepare=prepared(trials.proxy, settle=False)) as started:
            started.wait_until(lambda: logged(started.output) == 6 and "llama_v2-6steps (" in started.output)
            assert held.reached.is_set() and manifests(trials) == []
            assert "llama_v2-4steps was not uploaded: llama_v2-6steps is newer" in started.output
            held.hold.set()
            started.wait().succeeded()
    finally:
        held.hold.set()
    assert manifests(trials) == [2, 6] and damage(server) is None
    assert losses(run) == list(trials.expected[0].values())


@pytest.mark.parametrize("how", ["failing", "throttled"])
def test_a_store_that_fails_or_is_slow_changes_nothing_but_the_time(trials: Bench, how):
    server, run, rules = trials.bucket(), trials.fresh(), {"failing": [], "throttled": []}
    rules["failing"] = [share(0.15, Fault(status=503), seed=1), share(0.15, Fault(cut="applied"), seed=2)]
    trials.proxy.rules, trials.proxy.rate = rules[how], 200_000 if how == "throttled" else None
    try:
        ended = run_job(*job(server, run), world_size=2, prepare=prepared(trials.proxy, settle=False)).succeeded()
    finally:
        trials.proxy.rules, trials.proxy.rate = [], None
    assert losses(run) == list(trials.expected[0].values()), ended.output
    assert upload_kill_trials.digests(server, 6) == trials.expected[1] and damage(server) is None


def test_a_store_that_comes_back(trials: Bench):
    server, run = trials.bucket(), trials.fresh()
    prepare = prepared(trials.proxy, settle=False)
    try:
        with running_job(*job(server, run), world_size=2, prepare=prepare) as started:
            started.wait_until(lambda: trials.proxy.answered("put", "writer.json"))
            trials.proxy.away = True
            started.wait_until(lambda: "llama_v2-2steps was not uploaded" in started.output)
            started.wait_until(lambda: logged(started.output) == 6)
            trials.proxy.away = False
            started.wait().succeeded()
    finally:
        trials.proxy.away = False
    assert manifests(trials)[-1] == 6 and damage(server) is None


def test_a_store_that_is_away_for_good_leaves_the_checkpoint_here_and_the_next_run_uploads_it(trials: Bench):
    server, run = trials.bucket(), trials.fresh()
    prepare = prepared(trials.proxy, settle=False)
    try:
        with running_job(*job(server, run), world_size=2, prepare=prepare) as started:
            started.wait_until(lambda: trials.proxy.answered("put", "writer.json"))
            trials.proxy.away = True
            ended = started.wait()
    finally:
        trials.proxy.away = False
    assert set(ended.statuses) == {1} and logged(ended.output) == 6
    sentence = (
        rf"error: llama_v2-6steps could not be uploaded to {server.url}/run: .*cannot be .* It is kept in "
        rf"{run}/checkpoints: running again with --resume_from_checkpoint latest uploads it"
    )
    assert re.search(sentence, ended.output), ended.output
    run_job(*job(server, run), world_size=2, prepare=prepare).succeeded()
    assert upload_kill_trials.digests(server, 6) == trials.expected[1] and damage(server) is None


def test_a_store_that_is_away_at_the_start_is_one_sentence(trials: Bench):
    server, run = trials.bucket(), trials.fresh()
    trials.proxy.away = True
    try:
        ended = run_job(*job(server, run), world_size=2, prepare=prepared(trials.proxy))
    finally:
        trials.proxy.away = False
    assert set(ended.statuses) == {2} and "Traceback" not in ended.output
    assert ended.output.count("error: ") == 1 and f"{server.url}/run cannot be " in ended.output
    assert not (run / "metrics.jsonl").exists()
