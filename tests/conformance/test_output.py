"""What a person sees of a run: on a terminal, through a pipe, and after Ctrl-C."""

import fcntl
import os
import pathlib
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable

import pytest

from smp.train.__main__ import command
from tests.examples import torchrun_environment
from tests.job import LLAMA, read_metrics
from tests.ports import free_port

WORDS = [
    *LLAMA, "--use_synthetic_data", "1", "--train_batch_size", "2", "--validation_freq", "3", "--validation_batches",
    "1", "--val_batch_size", "2", "--logging_freq", "2", "--lr", "1e-3",
]  # fmt: skip
SMP_LINE = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d I \[metrics\.py:\d+\] Batch \d+ Loss: [\d.]+, Speed: [\d.]+ samples/sec, "
    r"Model TFLOPS/GPU: ([\d.]+), lr: [\d.]+, gradnorm: [\d.]+, Tokens/sec: \d+, Memory: [\d.]+ GiB, "
    r"Time left: [\d:]+, Processed tokens/sec: \d+"
)


def become_the_job(words: list[str], ranks: int = 1) -> None:
    """Go on as the command ``smp.train`` of so many ranks, which does not return, with what this process imported."""
    port, others = free_port(), []
    for rank in reversed(range(ranks)):
        child = os.fork() if rank else 0
        if child == 0:
            break
        others.append(child)
    if ranks > 1:
        os.environ.update(torchrun_environment(rank, ranks, port))
    sys.argv, sys.stdout, sys.stderr = ["train", *words], os.fdopen(1, "w"), os.fdopen(2, "w")
    status = 1
    try:
        status = command()
        sys.stdout.flush()
        for child in others:
            os.waitpid(child, 0)
    finally:
        os._exit(status)


def on_terminal(act: Callable[[], None], *, interrupt_at: bytes | None = None) -> tuple[int, str]:
    """Act in a terminal of 100 columns; returns the exit status and what was written to it.

    Args:
        act: does not return.
        interrupt_at: press Ctrl-C once this has appeared.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        act()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    written = b""
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # Linux's end of a terminal
            break
        if not piece:
            break
        written += piece
        if interrupt_at is not None and interrupt_at in written:
            os.write(terminal, b"\x03")
            interrupt_at = None
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), written.decode()


def screen(written: str) -> list[str]:
    """Return the lines that stand on the terminal at the end."""
    lines, column = [""], 0
    for token in re.findall(r"\x1b\[[\d;]*[A-Za-z]|[\r\n]|[^\r\n\x1b]+", written):
        if token == "\n":
            lines.append("")
        elif token == "\r":
            column = 0
        elif token == "\x1b[K":
            lines[-1] = lines[-1][:column]
        else:
            assert not token.startswith("\x1b"), token
            lines[-1] = lines[-1][:column] + token + lines[-1][column + len(token) :]
            column += len(token)
    return [line.rstrip() for line in lines if line.strip()]


def messages(lines: list[str]) -> list[str]:
    return [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in lines]


@pytest.mark.full
def test_a_terminal_shows_a_bar_below_a_few_lines(tmp_path):
    run = tmp_path / "run"
    words = [*WORDS, "--max_steps", "6", "--output_dir", str(run)]
    status, written = on_terminal(lambda: become_the_job(words, ranks=2))
    lines = screen(written)
    assert status == 0, written
    bars = [line for line in lines if line.startswith("Training ")]
    assert len(bars) == 1 and re.fullmatch(
        r"Training 100%\|█+\| 6/6 \[[\d:]+<00:00, loss \d\.\d{4}, [\d,]+ tokens/s \([\d,]+ labelled\)\]", bars[0]
    )
    assert re.search(r"Training +0%\|", written) and re.search(r" 3/6 \[", written)  # each step, not each logged one
    said = messages(lines)
    saved = next(i for i, line in enumerate(said) if line.startswith("Saved "))
    assert saved < lines.index(bars[0]) < said.index("Done: step 6 of 6. What next:")
    assert any(re.fullmatch(r"Created model .* total parameters: \d+ \([\d.]+ K\)", line) for line in said)
    text = "\n".join(said)
    assert "Batch 3 Validation loss" in text and "Collectives of this rank" not in text and " I [" not in text
    assert "Batch 2 Loss" not in text and "Running Avg" not in text
    assert len(said) == len(set(said)) <= 20
    log = (run / "logs/rank0.log").read_text()
    assert len(SMP_LINE.findall(log)) == 3 and "Collectives of this rank" in log
    assert "Collectives of this rank" in (run / "logs/rank1.log").read_text()
    assert f"curves:    {run}/curves.png" in text and (run / "curves.png").stat().st_size > 10_000
    assert "train on:  the same command with --max_steps 12 --resume_from_checkpoint latest" in text
    assert "make train" not in text


@pytest.mark.full
def test_a_pipe_gets_smp_v2_lines_and_asked_for_tables(tmp_path):
    words = [*WORDS, "--max_steps", "4", "--output_dir", str(tmp_path / "run"), "--comm_report", "1"]
    with open(tmp_path / "out", "w") as out, open(tmp_path / "err", "w") as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            become_the_job(words)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    out, err = ((tmp_path / name).read_text() for name in ("out", "err"))
    assert status == 0, err
    assert len(SMP_LINE.findall(out)) == 2 and "Training" not in out + err
    assert all(float(number) > 0 for number in SMP_LINE.findall(out))
    assert "\r" not in out + err and "\x1b" not in out + err
    assert out.count("Collectives of this rank:") == 1
    line = read_metrics(tmp_path / "run")[-1]
    assert line["processed_tokens_per_sec"] * 15 / 16 == pytest.approx(line["tokens_per_sec"])


@pytest.mark.full
def test_a_job_whose_output_nobody_reads_goes_on(tmp_path):
    """Without a word of what it could not print."""
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "smp.train", *WORDS, "--max_steps", "2", "--output_dir", str(tmp_path / "run")]
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.returncode == 0 and re.fullmatch(r"smp \S+: loading torch\n", done.stderr), done.stderr
    assert read_metrics(tmp_path / "run")[-1]["step"] == 2


@pytest.mark.full
def test_ctrl_c_leaves_the_bar_above_what_follows(tmp_path):
    launcher = [sys.executable, "-m", "smp.launch.local", "--nproc_per_node", "2", "-m", "smp.train"]
    words = [*launcher, *WORDS, "--max_steps", "100000", "--output_dir", str(tmp_path / "run")]
    status, written = on_terminal(lambda: os.execvp(words[0], words), interrupt_at=b" 3/100000 [")
    lines = screen(written)
    assert status == 130, written
    bar = next(line for line in lines if line.startswith("Training "))
    assert "Stopped on request" not in bar and "Saved" not in bar and "/100000 [" in bar
    assert sum("Stopped on request at step" in line for line in lines) == 1
    assert sum("all ranks stop at the next step boundary" in line for line in lines) == 1
    assert pathlib.Path(tmp_path / "run/checkpoints").is_dir()
