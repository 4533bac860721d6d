import json

import pytest

from smp import plots
from smp.train import curves
from tests.clock import Clock


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run directory, the clock that its curves go by, and how often they were drawn."""
    clock, drawn = Clock(), []
    monkeypatch.setattr(curves, "time", clock)

    def draw(metrics, png):
        clock.now += 0.5
        drawn.append(png)
        plots.plot_metrics(metrics, png)

    monkeypatch.setattr(curves, "plot_metrics", draw)
    line = {"step": 1, "loss": 5.0, "lr": 1e-4, "grad_norm": 1.0, "tokens_per_sec": 100.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    return tmp_path, clock, drawn


@pytest.mark.full
def test_curves_are_drawn_now_and_then_for_a_small_share_of_the_time(run):
    folder, clock, drawn = run
    redrawn = curves.Curves(folder)
    for _ in range(29):
        redrawn.redraw()
        clock.now += 1.0
    assert drawn == []
    for _ in range(1000):
        redrawn.redraw()
        clock.now += 1.0
    assert len(drawn) == 10  # after 30 s, and then at most half a second of a hundred
    assert [path.name for path in folder.iterdir() if "curves" in path.name] == ["curves.png"]


def test_a_picture_that_cannot_be_written_ends_no_run(run, monkeypatch):
    folder, clock, _ = run
    (folder / "curves.png").mkdir()
    redrawn = curves.Curves(folder)
    clock.now += 31
    redrawn.redraw()
    assert curves.write_curves(folder).startswith("it cannot be written")


def test_what_cannot_be_drawn_ends_no_run_and_costs_as_little(run, monkeypatch):
    folder, clock, _ = run
    tried = []

    def broken(metrics, png):
        clock.now += 0.5
        tried.append(png)
        raise RuntimeError("no such font")

    monkeypatch.setattr(curves, "plot_metrics", broken)
    redrawn = curves.Curves(folder)
    for _ in range(1030):
        redrawn.redraw()
        clock.now += 1.0
    assert len(tried) == 10  # with half a second each
    assert curves.write_curves(folder) == "it cannot be drawn (RuntimeError: no such font)"


def test_who_looks_while_it_is_drawn_sees_the_old_picture(run, monkeypatch):
    from matplotlib.figure import Figure

    folder, _, _ = run
    assert curves.write_curves(folder) == ""
    old, seen, save = (folder / "curves.png").read_bytes(), [], Figure.savefig

    def spy(figure, target, **options):
        save(figure, target, **options)
        seen.append((folder / "curves.png").read_bytes())

    monkeypatch.setattr(Figure, "savefig", spy)
    assert curves.write_curves(folder) == "" and seen == [old]
