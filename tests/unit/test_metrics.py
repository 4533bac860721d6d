import contextlib
import errno
import json
import logging
import math
import os
import resource
import threading

import pytest

from smp.errors import ConfigError, UserError
from smp.train import logging_config, metrics, writers
from smp.train.flops import Flops
from smp.train.logging_config import LoggingConfig
from smp.train.metrics import MetricsLogger, NullMetricsLogger, last_logged_step
from smp.train.state import TrainState
from smp.units import digits

MEMORY = {"mem_allocated_gib": None, "mem_peak_gib": 1.5, "host_rss_gib": 1.25}
KEYS = [
    "step", "loss", "lr", "grad_norm", "tokens", "samples_per_sec", "tokens_per_sec",
    "processed_tokens_per_sec", "step_time_s",
    "model_tflops_per_device", "mfu", "mem_allocated_gib", "mem_peak_gib", "host_rss_gib",
    "phase_s",
]  # fmt: skip


@pytest.fixture
def lines(monkeypatch):
    """The messages logged, whatever logging is set up to do."""
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    monkeypatch.setattr(metrics.logger, "disabled", False)
    metrics.logger.addHandler(handler)
    level = metrics.logger.level
    metrics.logger.setLevel(logging.INFO)
    yield found
    metrics.logger.removeHandler(handler)
    metrics.logger.setLevel(level)


def make(run_dir, *, config=None, max_steps=100, resume_from=None, peak_flops=1e12, of_pair=0):
    return MetricsLogger(
        config or LoggingConfig(), run_dir=run_dir, flops=Flops(10**9, of_pair, 50, ""), peak_flops=peak_flops,
        world_size=2, max_steps=max_steps, resume_from=resume_from,
    )  # fmt: skip


def report(logger, step, *, loss=2.0, seconds=0.5, computed=400, pairs=0):
    """Step ``step`` of a run with 8 samples and 400 tokens with a label per step."""
    logger.train_step(
        step, loss=loss, lr=1e-4, grad_norm=0.5, tokens=400 * step, samples=8 * step, step_time_s=seconds,
        memory=MEMORY, computed=(computed, pairs),
    )  # fmt: skip


def read(run_dir):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def scalars(folder):
    """Every scalar under a TensorBoard folder, as {tag: [(step, value), ...]}."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_a_line_has_the_agreed_keys_and_numbers(tmp_path):
    logger = make(tmp_path)
    report(logger, 1)
    report(logger, 3, computed=800)  # two steps at once
    logger.finish()
    first, second = read(tmp_path)
    assert list(first) == KEYS
    assert (first["samples_per_sec"], first["tokens_per_sec"]) == (16.0, 800.0)
    assert first["model_tflops_per_device"] == pytest.approx(0.4)  # 800 tokens/s x 1e9 / 2 devices
    assert first["mfu"] == pytest.approx(0.4)
    assert first["mem_allocated_gib"] is None and first["mem_peak_gib"] == 1.5
    assert (second["step"], second["tokens"], second["tokens_per_sec"]) == (3, 1200, 800.0)


def test_flops_are_of_all_tokens_that_are_computed_and_the_line_ends_with_their_rate(tmp_path, lines):
    logger = make(tmp_path)
    report(logger, 1, computed=640)
    (line,) = read(tmp_path)
    assert (line["tokens_per_sec"], line["processed_tokens_per_sec"]) == (800.0, 1280.0)
    assert line["model_tflops_per_device"] == pytest.approx(0.64) == line["mfu"]
    assert lines[-1].endswith("Tokens/sec: 800, Memory: 1.50 GiB, Time left: 0:00:50, Processed tokens/sec: 1280")


def test_attention_counts_by_the_width_of_the_rows_and_an_average_by_all_that_was_computed(tmp_path, lines):
    """Steps of 8 rows of 64 tokens, then of 32: of 1e7 FLOPs for each token and each that it attends to."""
    logger = make(tmp_path, config=LoggingConfig(logging_freq_for_avg=2), max_steps=2, of_pair=10**7)
    for step, columns in ((1, 64), (2, 32)):
        report(logger, step, computed=8 * columns, pairs=8 * columns**2)
    expected = [8 * n * (1e9 + 1e7 * n) / 0.5 / 2 / 1e12 for n in (64, 32)]
    assert [line["model_tflops_per_device"] for line in read(tmp_path)] == pytest.approx(expected)
    assert [line["processed_tokens_per_sec"] for line in read(tmp_path)] == [1024, 512]
    assert f"Running Avg Model TFLOPS/GPU: {expected[1]:.2f} (steps 2 to 2)" in lines[-1]


def test_one_rate_is_enough_where_they_hardly_differ(tmp_path, lines):
    report(make(tmp_path), 1, computed=403)  # 0.8 %, as where each 127th token has no label
    assert lines[-1].endswith("Time left: 0:00:50")


@pytest.mark.parametrize(
    ("value", "least", "text"),
    [
        (0.40, 2, "0.40"), (0.0243, 2, "0.024"), (1.24e-5, 2, "0.000012"), (123.456, 2, "123.46"), (0.0, 2, "0.00"),
        (1e-5, 6, "0.000010"), (3e-8, 6, "0.000000030"), (math.nan, 4, "nan"), (math.inf, 2, "inf"),
    ],
)  # fmt: skip
def test_small_numbers_keep_two_digits_and_read_as_floats(value, least, text):
    assert digits(value, least) == text and float(text) == pytest.approx(value, rel=0.05, nan_ok=True)


def test_mfu_is_null_where_the_peak_is_unknown(tmp_path):
    logger = make(tmp_path, peak_flops=None)
    report(logger, 1)
    assert read(tmp_path)[0]["mfu"] is None


def test_validation_lines_and_non_finite_numbers_are_strict_json(tmp_path):
    logger = make(tmp_path)
    report(logger, 1, loss=float("nan"))
    logger.validation(1, loss=2.0)
    logger.validation(2, loss=1000.0)
    train, good, bad = read(tmp_path)
    assert math.isnan(float(train["loss"]))
    assert good == {"step": 1, "val_loss": 2.0, "val_ppl": pytest.approx(math.exp(2))}
    assert bad["val_ppl"] == "inf" and math.isinf(float(bad["val_ppl"]))


def test_the_console_line_keeps_smp_wording(tmp_path, lines):
    logger = make(tmp_path)
    report(logger, 1)
    logger.validation(1, loss=2.0)
    assert lines == [
        "Batch 1 Loss: 2.00000, Speed: 16.00 samples/sec, Model TFLOPS/GPU: 0.40, lr: 0.000100, gradnorm: 0.5000, "
        "Tokens/sec: 800, Memory: 1.50 GiB, Time left: 0:00:50",
        "Batch 1 Validation loss: 2.00000",
        "Batch 1 Validation perplexity: 7.3891",
    ]


def test_slow_steps_have_a_speed(tmp_path, lines):
    logger = make(tmp_path, config=LoggingConfig(logging_freq_for_avg=2))
    for step in (1, 2):
        report(logger, step, seconds=2000.0)
    assert "Batch 1 Loss: 2.00000, Speed: 0.0040 samples/sec" in lines[0]


def test_a_validation_before_the_first_step_survives_a_resume(tmp_path, lines):
    logger = make(tmp_path)
    logger.validation(0, loss=3.0)
    report(logger, 1)
    logger.finish()
    make(tmp_path, resume_from=TrainState(1, 8, 400)).finish()
    assert [(r["step"], r.get("val_loss")) for r in read(tmp_path)] == [(0, 3.0), (1, None)]
    assert last_logged_step(tmp_path / "metrics.jsonl") == 1
    with pytest.raises(UserError, match="already contains the metrics of a run"):
        make(tmp_path)


@pytest.mark.parametrize("begin", [None, TrainState(0, 0, 0)], ids=["start", "latest"])
def test_a_run_that_ended_before_its_first_step_is_begun_again(begin, tmp_path, lines):
    logger = make(tmp_path)
    logger.validation(0, loss=3.0)
    logger.finish()
    logger = make(tmp_path, resume_from=begin)
    logger.validation(0, loss=3.0)
    logger.finish()
    assert [r["step"] for r in read(tmp_path)] == [0]
    assert scalars(tmp_path / "tensorboard")["Loss/val"] == [(0, 3.0)]


def test_one_slow_step_does_not_move_the_time_left(tmp_path, lines):
    logger = make(tmp_path, max_steps=7205)
    for step in range(1, 6):
        report(logger, step, seconds=1000.0 if step == 4 else 0.5)
    assert lines[-1].endswith("Time left: 1:00:00")


def test_running_averages_leave_out_the_first_steps(tmp_path, lines):
    logger = make(tmp_path, config=LoggingConfig(logging_freq_for_avg=10))
    for step in range(1, 31):
        report(logger, step, seconds=0.5 if step > 15 else 50.0)
    averages = [line for line in lines if "Running" in line]
    assert averages == [
        f"Batch {n} Running Avg Speed: 16.00 samples/sec, Running Avg Model TFLOPS/GPU: 0.40 (steps 16 to {n})"
        for n in (20, 30)
    ]


def test_short_runs_average_over_their_second_half(tmp_path, lines):
    logger = make(tmp_path, config=LoggingConfig(logging_freq_for_avg=10), max_steps=10)
    for step in range(1, 11):
        report(logger, step)
    assert lines[-1].endswith("(steps 6 to 10)")


def test_resuming_drops_the_lost_stretch_and_continues(tmp_path, lines):
    logger = make(tmp_path)
    for step in range(1, 6):
        report(logger, step)
    logger.validation(3, loss=1.0)
    logger.validation(4, loss=1.0)
    logger.finish()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # a crash in the middle of a line
    logger = make(tmp_path, resume_from=TrainState(3, 24, 1200))
    report(logger, 4, loss=9.0)
    assert [(r["step"], r.get("loss")) for r in read(tmp_path)] == [(1, 2.0), (2, 2.0), (3, 2.0), (3, None), (4, 9.0)]
    assert read(tmp_path)[-1]["tokens_per_sec"] == 800.0
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".tmp"] == []


@contextlib.contextmanager
def files_end_at(size):
    """A file system that takes no more than ``size`` bytes of each file: a short write, then an error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_lines_out_and_ends_nothing(tmp_path, lines, monkeypatch):
    monkeypatch.setattr(logging_config, "has_tensorboard", lambda: False)
    logger = make(tmp_path)
    report(logger, 1)
    with files_end_at((tmp_path / "metrics.jsonl").stat().st_size + 10):
        for step in (2, 3):
            report(logger, step)
            logger.validation(step, loss=1.0)
    report(logger, 4)
    logger.finish()
    assert [record["step"] for record in read(tmp_path)] == [1, 4]
    assert sum("metrics.jsonl cannot be written (No space left on device)" in line for line in lines) == 1


def test_a_full_disk_leaves_curves_of_tensorboard_out(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)  # of TensorBoard's own thread
    with caplog.at_level(logging.WARNING, logger="smp"):
        caplog.handler.setLevel(logging.WARNING)
        logging.getLogger("smp").addHandler(caplog.handler)
        written = writers.Writers([tmp_path / "a"], 0)
        with files_end_at(1):
            for step in range(3):
                written.scalar("Loss/train", 1.0, step)
            written.close()
        written.close()
        logging.getLogger("smp").removeHandler(caplog.handler)
    assert len({record.getMessage() for record in caplog.records}) == 1
    assert "TensorBoard's" in caplog.text and "it gets no more curves" in caplog.text


def test_a_resume_on_a_full_disk_trains_without_metrics(tmp_path, lines, monkeypatch):
    logger = make(tmp_path)
    for step in (1, 2):
        report(logger, step)
    logger.finish()
    before = (tmp_path / "metrics.jsonl").read_text()

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(metrics.os, "fsync", full)
    logger = make(tmp_path, resume_from=TrainState(1, 8, 400))
    report(logger, 2)
    logger.finish()
    assert any("this start writes no metrics" in line for line in lines)
    assert (tmp_path / "metrics.jsonl").read_text() == before
    assert not list(tmp_path.glob("*.tmp"))


def test_a_new_run_refuses_an_old_runs_metrics(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl already contains .*--resume_from_checkpoint.*--output_dir"):
        make(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_an_unwritable_run_directory_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*metrics\.jsonl .*--output_dir"):
        make(tmp_path / "file")


def test_tensorboard_has_smp_tags_in_every_folder(tmp_path):
    folders = (str(tmp_path / "a"), str(tmp_path / "b"))
    logger = make(tmp_path, config=LoggingConfig(tensorboard_dir=folders))
    report(logger, 1)
    logger.validation(1, loss=2.0)
    logger.writers.text("Arguments", "hf_access_token: s3cr3t")
    logger.finish()
    for folder in folders:
        found = scalars(folder)
        assert {"Loss/train", "Perf/SeqPerSec", "Perf/ModelTFLOPs", "LR/learning_rate", "Norms/grad_norm"} < set(found)
        assert found["Loss/val"] == [(1, 2.0)] and found["Loss/perplexity"][0][1] == pytest.approx(7.389, rel=1e-3)
    assert {p.name for p in (tmp_path / "a").iterdir() if p.is_dir()} == {"Perf_runtime_total", "Perf_runtime_train"}
    assert not any(b"s3cr3t" in p.read_bytes() for p in (tmp_path / "a").rglob("*") if p.is_file())


def test_tensorboard_hides_the_lost_stretch_after_a_resume(tmp_path):
    logger = make(tmp_path)
    for step in range(1, 5):
        report(logger, step)
    logger.finish()
    logger = make(tmp_path, resume_from=TrainState(2, 16, 800))
    report(logger, 3, loss=9.0)
    logger.finish()
    assert scalars(tmp_path / "tensorboard")["Loss/train"] == [(1, 2.0), (2, 2.0), (3, 9.0)]


def test_without_tensorboard_one_line_says_how_to_get_it(tmp_path, lines, monkeypatch):
    monkeypatch.setattr(logging_config, "has_tensorboard", lambda: False)
    report(make(tmp_path), 1)
    assert [line for line in lines if "pip install" in line] == [
        "No TensorBoard curves: pip install tensorboard to have them."
    ]
    with pytest.raises(ConfigError, match="--tensorboard_dir needs TensorBoard: pip install"):
        LoggingConfig(tensorboard_dir=("x",))


def test_nccl_tests_bandwidths_reach_tensorboard(tmp_path):
    log = tmp_path / "nccl.txt"
    log.write_text("# Avg bus bandwidth    : 4.5\nx\n 0: # Avg bus bandwidth    : 7.5 \n")
    make(tmp_path / "run", config=LoggingConfig(nccl_test_log=str(log))).finish()
    folder = tmp_path / "run/tensorboard"
    assert scalars(folder)["NCCLTest/len"] == [(0, 2.0)]
    assert scalars(folder / "NCCLTest_stats_mean")["NCCLTest/stats"] == [(0, 6.0)]


@pytest.mark.parametrize(("text", "sentence"), [(None, "cannot be read"), ("nothing", "has no line 'Avg bus")])
def test_an_nccl_tests_log_without_bandwidths_is_refused(tmp_path, text, sentence):
    path = tmp_path / "nccl.txt"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=f"--nccl_test_log .*{sentence}"):
        make(tmp_path, config=LoggingConfig(nccl_test_log=str(path)))


def test_the_twin_writes_nothing(tmp_path, monkeypatch, lines):
    monkeypatch.chdir(tmp_path)
    twin = NullMetricsLogger()
    report(twin, 1)
    twin.validation(1, loss=1.0)
    twin.writers.text("a", "b")
    twin.writers.scalar("a", 1.0, 1)
    twin.finish()
    assert lines == [] and list(tmp_path.iterdir()) == []


def test_due_names_the_reported_steps():
    config = LoggingConfig(logging_freq=4)
    assert [step for step in range(1, 11) if config.due(step, max_steps=10)] == [4, 8, 10]
