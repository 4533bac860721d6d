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


@pytest.mark.parametrize("broken", [pytest.param(False, marks=pytest.mark.full), True])
def test_curves_are_drawn_now_and_then_for_a_small_share_of_the_time(broken, run, monkeypatch):
    """And what cannot be drawn costs as little, and ends no run."""

    def fail(metrics, png):
        raise RuntimeError("no such font")

    folder, clock, drawn = run
    if broken:
        monkeypatch.setattr(plots, "plot_metrics", fail)
    redrawn = curves.Curves(folder)
    for _ in range(29):
        redrawn.redraw()
        clock.now += 1.0
    assert drawn == []
    for _ in range(1000):
        redrawn.redraw()
        clock.now += 1.0
    assert len(drawn) == 10  # after 30 s, and then at most half a second of a hundred
    assert [path.name for path in folder.iterdir() if "curves" in path.name] == ([] if broken else ["curves.png"])
    assert curves.write_curves(folder) == ("it cannot be drawn (RuntimeError: no such font)" if broken else "")


def test_a_picture_that_cannot_be_written_ends_no_run(run, monkeypatch):
    folder, clock, _ = run
    (folder / "curves.png").mkdir()
    redrawn = curves.Curves(folder)
    clock.now += 31
    redrawn.redraw()
    assert curves.write_curves(folder).startswith("it cannot be written")


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
