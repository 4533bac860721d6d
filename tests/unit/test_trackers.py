"""Experiment trackers: runs report to MLflow, trackio and W&B offline, and what these have kept is read back."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import sqlite3
import struct
import subprocess
import threading
import typing

import pytest
import torch
import yaml

from smp.errors import ConfigError
from smp.train import writers
from smp.train.logging_config import LoggingConfig, Tracker
from smp.train.writers import Trackers
from tests.flags import SYNTHETIC, check, parse
from tests.job import LLAMA, run_job

TINY = [*LLAMA, *SYNTHETIC, "--validation_freq", 2, "--max_steps", 4]
KEY, TOKEN = "0123456789abcdef0123456789abcdef01234567", "hf_abcdefghijklmnopqrstuvwxyzabcdefgh"
Kept = dict[tuple[str, int], float]


def in_metrics_file(run: pathlib.Path) -> Kept:
    """What ``metrics.jsonl`` has, by a tracker's name for the curve and the step."""
    found = {}
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        step = line.pop("step")
        phases = line.pop("phase_s", {})
        for key, value in (line | {f"phase_s/{phase}": seconds for phase, seconds in phases.items()}).items():
            curve = key.replace("val_", "val/") if "val_" in key else f"train/{key}"
            if value is not None:
                found[curve, step] = float(value)
    return found


def in_mlflow(root: pathlib.Path) -> tuple[Kept, dict, str]:
    runs = [path for path in root.glob("mlruns/*/*") if (path / "params").is_dir()]
    assert len(runs) == 1
    kept = {}
    for file in (runs[0] / "metrics").rglob("*"):
        for line in file.read_text().splitlines() if file.is_file() else []:
            _, value, step = line.split()
            kept[str(file.relative_to(runs[0] / "metrics")), int(step)] = float(value)
    params = {file.name: file.read_text() for file in (runs[0] / "params").iterdir()}
    return kept, params, (runs[0] / "tags" / "mlflow.runName").read_text()


def in_trackio(root: pathlib.Path) -> tuple[Kept, dict, str]:
    connection = sqlite3.connect(root / "trackio" / "mine.db")
    rows = connection.execute("select step, metrics from metrics").fetchall()
    kept = {(curve, step): float(value) for step, text in rows for curve, value in json.loads(text).items()}
    ((name, config),) = connection.execute("select run_name, config from configs").fetchall()
    return kept, json.loads(config), name


def in_wandb(root: pathlib.Path) -> tuple[Kept, dict, str]:
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = root.glob("wandb/offline-run-*/*.wandb")
    kept, config, name = {}, {}, ""
    for data in leveldb_records(file.read_bytes()):
        record = Record.FromString(data)
        name = record.run.display_name or name
        updates = [*record.config.update, *record.run.config.update]
        config.update({item.key: json.loads(item.value_json) for item in updates if item.key})
        values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        kept.update({(k, values["_step"]): float(v) for k, v in values.items() if not k.startswith("_")})
    return kept, config, name


def leveldb_records(data: bytes) -> typing.Iterator[bytes]:
    """Yield the records of LevelDB's log format, in which W&B writes, after its header of 7 bytes."""
    place, part = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        part += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield part
            part = b""


OFFLINE = {"mlflow": in_mlflow, "trackio": in_trackio, "wandb": in_wandb}


def skip_without(name: str) -> None:
    """Skip where a package is missing; it is not imported here, where forked runs would inherit its settings."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")


@pytest.fixture
def offline(monkeypatch, tmp_path):
    for name, value in {
        "MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true",
        "TRACKIO_DIR": f"{tmp_path}/trackio", "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_API_KEY": KEY,
        "HF_TOKEN": TOKEN, "DO_NOT_TRACK": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)


@pytest.mark.full
@pytest.mark.parametrize("name", OFFLINE)
def test_a_run_of_two_processes_is_found_in_the_tracker(name, offline, tmp_path):
    skip_without(name)
    words = ["--report_to", name, "--project", "mine", "--output_dir", tmp_path / "seven"]
    outcome = run_job(*TINY, *words, world_size=2).succeeded()
    assert "Training continues" not in outcome.output
    kept, config, run_name = OFFLINE[name](tmp_path)
    wanted = in_metrics_file(tmp_path / "seven")
    assert len(wanted) >= 44 and ("val/loss", 4) in wanted
    assert kept == wanted
    assert str(config["max_steps"]) == "4" and config["model_type"] == "llama_v2"
    assert run_name == "seven"
    for path in tmp_path.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert KEY.encode() not in content and TOKEN.encode() not in content, path
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert not any("wandb-core" in line and str(tmp_path) in line for line in left.splitlines())


@check("report_to", "project", "run_name")
@pytest.mark.full
def test_names_and_a_resumed_run(offline, tmp_path):
    """Steps go on in a run of the same name."""
    skip_without("trackio")
    words = ["--report_to", "trackio", "--project", "mine", "--run_name", "eight", "--output_dir", tmp_path / "run"]
    run_job(*TINY, *words, "--lr_decay_iters", 6, "--checkpoint_freq", 4).succeeded()
    assert in_trackio(tmp_path)[2] == "eight"
    run_job(*TINY, *words, "--lr_decay_iters", 6, "--max_steps", 6, "--resume_from_checkpoint", "latest").succeeded()
    rows = sqlite3.connect(tmp_path / "trackio" / "mine.db").execute("select run_name, step from metrics").fetchall()
    assert {step for _, step in rows} == {0, 1, 2, 3, 4, 5, 6}  # 0: the validation before the first
    assert all(run_name.startswith("eight") for run_name, _ in rows)


class Recorder:
    """A tracker that keeps what it is called with."""

    requires_logging_directory = False

    def __init__(self, project, **options):
        self.calls = [("init", project, options)]
        made.append(self)

    def start(self):
        self.calls.append(("start", torch.distributed.is_initialized()))

    def store_init_configuration(self, values):
        self.calls.append(("config", values))

    def log(self, values, step):
        self.calls.append(("log", values, step))

    def finish(self):
        self.calls.append(("finish",))


made: list[Recorder] = []


@pytest.fixture
def use(monkeypatch):
    """Put a tracker of the test in W&B's place; the warnings are returned."""
    import accelerate.tracking

    made.clear()
    said: list[str] = []
    monkeypatch.setattr(writers.logger, "warning", lambda text, *values: said.append(text % values))

    def put(kind):
        monkeypatch.setitem(accelerate.tracking.LOGGER_TYPE_TO_CLASS, "wandb", kind)
        return said

    return put


def test_what_a_tracker_gets(use):
    said = use(Recorder)
    threads = torch.get_num_threads()
    config = {"lr": 0.1, "checkpoint_dir": ["s3://key:hidden@host/b"], "training_dir": f"/data/{TOKEN}"}
    with Trackers(("wandb",), project="p", run_name="r", config=config) as trackers:
        trackers.log({"step": 3, "loss": 1.5, "mfu": None})
        trackers.log({"step": 3, "val_loss": 2.5, "val_ppl": 12.0})
    assert made[0].calls == [
        ("init", "p", {"name": "r"}), ("start", False),
        ("config", {"lr": 0.1, "checkpoint_dir": ["s3://key:***@host/b"], "training_dir": "/data/***"}),
        ("log", {"train/loss": 1.5}, 3), ("log", {"val/loss": 2.5, "val/ppl": 12.0}, 3), ("finish",),
    ]  # fmt: skip
    assert torch.get_num_threads() == threads and not said


def test_a_tracker_is_finished_at_an_error(use):
    use(Recorder)
    with pytest.raises(KeyError), Trackers(("wandb",)) as trackers:
        trackers.log({"step": 1, "loss": 1.0})
        raise KeyError
    assert made[0].calls[-2:] == [("log", {"train/loss": 1.0}, 1), ("finish",)]


def test_where_accelerate_refuses_the_device_training_goes_on(use, monkeypatch):
    def refuse():
        raise NotImplementedError("no such card")

    monkeypatch.setattr("accelerate.PartialState", refuse)
    said = use(Recorder)
    with Trackers(("wandb",)):
        pass
    assert [text.split(". ")[0] for text in said] == ["--report_to wandb: NotImplementedError: no such card"]


@pytest.mark.parametrize("broken", ["start", "store_init_configuration", "log", "finish"])
def test_a_failing_tracker_is_one_warning(broken, use):
    def fail(self, *_, **__):
        raise ConnectionError("no route to the server\nand more")

    said = use(type("Broken", (Recorder,), {broken: fail}))
    with Trackers(("wandb",)) as trackers:
        for step in range(1, 5):
            trackers.log({"step": step, "loss": 1.0})
    (warning,) = said
    assert warning.startswith("--report_to wandb: ConnectionError: no route to the server. Training continues")


def test_a_tracker_that_hangs_is_left_behind(use, monkeypatch):
    """Values beyond the queue's room are dropped, and leaving ends at its limit."""
    release = threading.Event()
    said = use(type("Hanging", (Recorder,), {"start": lambda self: release.wait()}))
    monkeypatch.setattr(writers, "MAX_WAITING", 2)
    monkeypatch.setattr(writers, "FINISH_SECONDS", 0.05)
    with Trackers(("wandb",)) as trackers:
        for step in range(1, 5):
            trackers.log({"step": step, "loss": 1.0})
    release.set()
    assert [text.split(":")[1] for text in said] == [
        " 2 records wait; those that follow are dropped. Training continues; metrics.jsonl has every value.",
        " not finished after 0.05 s, its last values are lost",
    ]


def test_every_tracker_of_accelerate_is_accepted():
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    assert set(typing.get_args(Tracker)) == {*LOGGER_TYPE_TO_CLASS, "none"}


def test_a_missing_package_is_refused(monkeypatch):
    import accelerate.tracking

    monkeypatch.setattr(accelerate.tracking, "_available_trackers", [])
    with pytest.raises(ConfigError, match=r"--report_to comet_ml needs .* not installed: pip install comet_ml, or"):
        LoggingConfig(report_to=("comet_ml",))
    with pytest.raises(ConfigError, match="has none and a tracker: leave one out"):
        LoggingConfig(report_to=("none", "wandb"))
    assert LoggingConfig(report_to=("none",)).trackers == LoggingConfig(report_to=("tensorboard",)).trackers == ()


@pytest.mark.parametrize(
    "words",
    [
        ["--checkpoint_dir", "s3://AKIDEXAMPLE:hidden/secret@host/bucket"],
        ["--checkpoint_dir", "a", "s3://key:hidden@host/bucket"],
        ["--training_dir", f"/data/{TOKEN}/text"],
        ["--output_dir", "https://host/x?access_token=hidden"],
    ],
)
def test_a_secret_in_a_setting_is_refused(words, tmp_path):
    """Not redacted: ``config.yaml`` is read again by ``--config``, and would silently name another place."""
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({words[0][2:]: words[1:] if len(words) > 2 else words[1]}))
    for given in (words, ["--config", file]):
        with pytest.raises(ConfigError) as error:
            parse([*LLAMA, *SYNTHETIC, *given])
        assert "contains a secret, which config.yaml and the checkpoints would keep" in str(error.value)
        assert "hidden" not in str(error.value) and TOKEN not in str(error.value)
