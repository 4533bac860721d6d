import json
import subprocess
import sys

import pytest

from smp.errors import UserError
from smp.plots import main, plot_metrics


def write(folder, steps=3, extra=""):
    records = [
        {"step": s, "loss": 5.0 / s, "lr": 1e-4 / s, "grad_norm": "nan" if s == 2 else 1.0, "tokens_per_sec": 2e4 + s}
        for s in range(1, steps + 1)
    ] + [{"step": steps, "val_loss": 2.0, "val_ppl": 7.4}]
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + extra)
    return path


def test_draws_every_series(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    drawn, plot = {}, Axes.plot

    def spy(axes, x, y, **style):
        drawn.setdefault(axes, []).append((list(x), list(y)))
        return plot(axes, x, y, **style)

    monkeypatch.setattr(Axes, "plot", spy)
    plot_metrics(write(tmp_path), tmp_path / "out/curves.png")
    assert (tmp_path / "out/curves.png").read_bytes().startswith(b"\x89PNG")
    by_title = {axes.get_title(loc="left"): series for axes, series in drawn.items()}
    assert by_title["Loss"] == [([1, 2, 3], [5.0, 2.5, 5.0 / 3]), ([3], [2.0])]
    assert by_title["Tokens per second"] == [([1, 2, 3], [20001, 20002, 20003])]
    assert {"Learning rate", "Gradient norm, before clipping"} < set(by_title) and len(by_title) == 4
    drawn.clear()
    path = write(tmp_path)
    rewards = {"rewards/chosen": 0.2, "rewards/rejected": -0.1, "rewards/accuracies": 1.0}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line | rewards if "loss" in line else line) + "\n" for line in lines))
    plot_metrics(path, tmp_path / "curves.png")
    by_title = {axes.get_title(loc="left"): series for axes, series in drawn.items()}
    assert [values[1] for values in by_title["Rewards"]] == [[0.2] * 3, [-0.1] * 3]
    assert by_title["Chosen answer preferred"] == [([1, 2, 3], [1.0] * 3)]
    drawn.clear()
    path = write(tmp_path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    shares = {"experts/busiest_share": 0.75, "experts/tokens": [[2, 6], [4, 4]]}
    path.write_text("".join(json.dumps(line | shares if "loss" in line else line) + "\n" for line in lines))
    images, imshow = [], Axes.imshow
    monkeypatch.setattr(Axes, "imshow", lambda axes, x, **style: images.append(x) or imshow(axes, x, **style))
    plot_metrics(path, tmp_path / "curves.png")
    by_title = {axes.get_title(loc="left"): series for axes, series in drawn.items()}
    assert by_title["Share of the busiest expert"] == [([1, 2, 3], [0.75] * 3)]
    assert images == [[[0.25, 0.75], [0.5, 0.5]]]


@pytest.mark.full
def test_the_module_draws_a_run_directory(tmp_path):
    write(tmp_path, extra='{"step": 4, "lo')  # a run being written
    command = [sys.executable, "-m", "smp.plots", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "curves.png") and (tmp_path / "curves.png").stat().st_size > 10_000


def test_without_matplotlib_a_sentence_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"need matplotlib: pip install matplotlib"):
        plot_metrics(write(tmp_path), tmp_path / "curves.png")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, r"cannot read .*metrics\.jsonl"),
        ("", "contains no training step yet"),
        ('{"step": 1}\nhello\n{"step": 2}\n', r"metrics\.jsonl:2 is not JSON"),
    ],
)
def test_bad_input_is_a_sentence_and_status_2(tmp_path, capsys, text, sentence):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(UserError, match=sentence):
        plot_metrics(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    assert main([str(tmp_path)]) == 2 and "metrics.jsonl" in capsys.readouterr().err
    assert main([]) == 2
