import io
import logging
import os
import sys
import termios

import pytest

from smp.data.progress import Progress
from smp.log import FILE_ONLY, configure_logging, get_logger
from smp.train.progress_bar import ProgressBar
from tests.unit.test_log import restored_logger  # noqa: F401


class Terminal(io.StringIO):
    """A terminal that can go away."""

    gone = False

    def __init__(self, columns=80):
        super().__init__()
        self.ends = os.openpty()
        termios.tcsetwinsize(self.ends[1], (24, columns))

    def fileno(self):
        return self.ends[1]

    def isatty(self):
        return True

    def write(self, text):
        if self.gone:
            raise OSError(5, "Input/output error")
        return super().write(text)


def put_in_place(monkeypatch, **about):
    """Make standard output a terminal: in the test itself, as pytest sets it between a fixture and a test."""
    terminal = Terminal(**about)
    monkeypatch.setattr(sys, "stdout", terminal)
    return terminal


def test_records_appear_above_the_bar_and_the_bar_ends_its_line(monkeypatch, tmp_path):
    terminal = put_in_place(monkeypatch)
    configure_logging(rank=0, local_rank=0, world_size=1, log_dir=tmp_path)
    with ProgressBar(10, 4) as bar:
        assert bar.shown
        bar.tell("loss 2.5000")
        bar.reach(7)
        get_logger("x").info("Batch 7 Loss: 2.5", extra=FILE_ONLY)
        get_logger("x").warning("mind")
    text = terminal.getvalue()
    assert "4/10" in text and "loss 2.5000" in text and text.endswith("\n")
    before, _, after = text.partition("warning: mind\n")
    assert before.rstrip("0123456789: ").endswith("\r") and "7/10" in after  # cleared, and drawn again below
    assert "Batch 7" not in text and "Batch 7 Loss: 2.5" in (tmp_path / "rank0.log").read_text()


def test_a_bar_ends_its_line_at_an_error(monkeypatch):
    terminal = put_in_place(monkeypatch)
    with pytest.raises(KeyError), ProgressBar(10, 0) as bar:
        bar.reach(1)
        raise KeyError
    assert terminal.getvalue().endswith("\n") and not bar.shown


def test_a_terminal_that_has_gone_ends_no_run(monkeypatch):
    terminal = put_in_place(monkeypatch)
    configure_logging(rank=0, local_rank=0, world_size=1, log_dir=None)
    with ProgressBar(10, 0) as bar:
        terminal.gone = True
        bar.tell("x")
        bar.reach(5)
        logging.getLogger("smp.x").info("nobody sees it")
        bar.reach(10)


@pytest.mark.parametrize("columns", [0, None])
def test_lines_where_no_bar_can_be_drawn(columns, monkeypatch):
    """In a terminal without columns, as mpirun makes one for each rank, and without standard output."""
    terminal = put_in_place(monkeypatch, columns=columns or 0)
    if columns is None:
        monkeypatch.setattr(sys, "stdout", None)
        monkeypatch.setattr(sys, "stderr", terminal)
    configure_logging(rank=0, local_rank=0, world_size=1, log_dir=None)
    with ProgressBar(10, 0) as bar, Progress("data", 1, 1) as conversion:
        bar.reach(5)
        conversion.end_file(1)
        get_logger("x").info("Batch 5 Loss: 2.5", extra=FILE_ONLY if bar.shown else None)
    first, second = terminal.getvalue().splitlines()
    assert "Batch 5 Loss: 2.5" in first and "data: 1/1 files" in second


@pytest.mark.parametrize("why", ["other rank", "a pipe"])
def test_no_bar(why, monkeypatch):
    terminal = put_in_place(monkeypatch)
    if why == "a pipe":
        monkeypatch.setattr(terminal, "fileno", lambda: os.open(os.devnull, os.O_WRONLY))
        monkeypatch.setattr(terminal, "isatty", lambda: False)
    with ProgressBar(10, 0, wanted=why != "other rank") as bar:
        bar.reach(5)
        bar.tell("x")
        assert not bar.shown
    assert terminal.getvalue() == ""
