import itertools
import math

import pytest
import torch

from smp.errors import ConfigError
from smp.train.lr_schedule import LRConfig, lr_at, set_lr

STYLES = ["linear", "cosine", "exponential", "plateau", "wsd"]


def smp_v2(style, step, **kwargs):
    settings = {"lr": 1e-4, "lr_decay_iters": 1000, "warmup": 0.1, "min_lr": 0.0, **kwargs}
    return lr_at(LRConfig(lr_decay_style=style, lr_compat="smp_v2", **settings), step, max_steps=7)


@pytest.mark.parametrize(
    ("style", "min_lr", "last"),
    [
        ("linear", 1e-5, 2.0e-5),
        ("exponential", 1e-5, 5.744e-5),  # 1e-4 exp(-0.693 * 0.8)
        ("cosine", 0.0, 9.549e-6),  # 5e-5 (cos(0.8 pi) + 1)
        ("cosine", 1e-5, 1e-5),  # the same, clipped
        ("constant", 1e-5, 1e-4),
    ],
)
def test_smp_v2_decays_stop_at_eight_tenths(style, min_lr, last):
    for step in (900, 1000, 5000):  # m = min(n, N - W) - W stays at N - 2W
        assert smp_v2(style, step, min_lr=min_lr) == pytest.approx(last, rel=5e-4)


def test_smp_v2_in_between():
    assert smp_v2("linear", 600) == pytest.approx(0.5e-4)  # m = 500
    assert smp_v2("cosine", 600) == pytest.approx(0.5e-4)
    assert smp_v2("exponential", 600) == pytest.approx(1e-4 * math.exp(-0.3465))
    assert smp_v2("plateau", 300, plateau=0.2) == 1e-4
    assert smp_v2("plateau", 650, plateau=0.2) == pytest.approx(0.5e-4)  # (1000 - 650) / 700
    assert smp_v2("plateau", 2000, plateau=0.2, min_lr=3e-6) == 3e-6
    assert smp_v2("plateau", 2000, plateau=0.9) == 0.0


def test_smp_v2_warm_up_starts_at_zero_whatever_min_lr():
    assert smp_v2("cosine", 0, min_lr=1e-5) == 0.0
    assert smp_v2("cosine", 50, min_lr=1e-5) == pytest.approx(5e-5)
    assert smp_v2("cosine", 1, warmup=0.9) == pytest.approx(1e-4 / 900)
    assert smp_v2("cosine", 500, warmup=0.9) == pytest.approx(1e-4 / 9)  # min(n, N - W) caps the warm-up at 100


def test_smp_v2_horizon_is_47683_unless_given():
    config = LRConfig(lr_decay_style="linear", warmup=0.0, lr_compat="smp_v2")
    assert lr_at(config, 5000, max_steps=5000) == pytest.approx(1e-4 * (47683 - 5000) / 47683, rel=1e-12)


@pytest.mark.parametrize("style", STYLES)
def test_warms_up_from_above_zero_and_ends_at_min_lr(style):
    config = LRConfig(lr=1e-3, min_lr=1e-5, lr_decay_style=style, warmup=0.1)
    rates = [lr_at(config, step, max_steps=100) for step in range(120)]
    assert rates[:10] == pytest.approx([1e-4 * i for i in range(1, 11)])
    assert rates[98] > 1e-5 and rates[99:] == [1e-5] * 21
    assert all(a >= b for a, b in itertools.pairwise(rates[9:]))


@pytest.mark.parametrize(
    ("style", "at_update_55"),
    [
        ("constant", 1e-3),
        ("linear", 5.05e-4),  # half of the 90 updates of decay
        ("cosine", 5.05e-4),
        ("exponential", 1e-4),  # the geometric mean of 1e-3 and 1e-5
        ("wsd", 1e-3),
    ],
)
def test_half_way(style, at_update_55):
    config = LRConfig(lr=1e-3, min_lr=1e-5, lr_decay_style=style, warmup=0.1)
    assert lr_at(config, 54, max_steps=100) == pytest.approx(at_update_55)


def test_plateau_and_wsd_hold_and_then_fall_linearly():
    plateau = LRConfig(lr=1.0, min_lr=0.0, lr_decay_style="plateau", warmup=0.1, plateau=0.4)
    assert [lr_at(plateau, i - 1, max_steps=100) for i in (10, 50, 75, 100)] == pytest.approx([1.0, 1.0, 0.5, 0.0])
    wsd = LRConfig(lr=1.0, min_lr=0.0, lr_decay_style="wsd", wsd_decay=0.2, warmup=0.1)
    assert [lr_at(wsd, i - 1, max_steps=100) for i in (10, 80, 90, 100)] == pytest.approx([1.0, 1.0, 0.5, 0.0])


def test_the_given_horizon_wins_over_max_steps_and_warm_up_rounds_up():
    config = LRConfig(lr=1.0, min_lr=0.5, lr_decay_iters=10, lr_decay_style="linear", warmup=0.11)
    assert [lr_at(config, i - 1, max_steps=1000) for i in (1, 2, 3, 10, 11)] == pytest.approx(
        [0.5, 1, 0.9375, 0.5, 0.5]
    )
    assert lr_at(LRConfig(lr=1.0, warmup=0.07), 6, max_steps=100) == 1.0  # 0.07 * 100 > 7 in floating point


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"lr": 1e-6}, "--min_lr 1e-05 is above --lr 1e-06"),
        ({"lr": 0.0}, "--lr must be greater than 0, got 0.0"),
        ({"lr": float("nan")}, "--lr must be greater than 0, got nan"),
        ({"lr": float("inf")}, "--lr must be finite"),
        ({"warmup": 1.5}, "--warmup must be at most 1, got 1.5"),
        ({"warmup": 0.6, "plateau": 0.5, "lr_decay_style": "plateau"}, "--warmup 0.6 and --plateau 0.5 .* at most 1"),
        ({"warmup": 0.6, "wsd_decay": 0.5, "lr_decay_style": "wsd"}, "--warmup 0.6 and --wsd_decay 0.5 .* at most 1"),
        ({"plateau": 0.5}, "--plateau 0.5 is for --lr_decay_style plateau only, and the style is cosine"),
        ({"min_lr": 0.0, "lr_decay_style": "exponential"}, "exponential cannot reach --min_lr 0"),
        ({"lr_decay_style": "wsd", "lr_compat": "smp_v2"}, "--lr_compat smp_v2 has no style wsd"),
    ],
)
def test_problems_are_named(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        LRConfig(**settings)


def test_every_parameter_group_gets_the_rate():
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [w]} for w in weights], lr=9.0)
    config = LRConfig(lr=1.0, min_lr=0.0, lr_decay_style="linear", warmup=0.0)
    assert set_lr(optimizer, config, 4, max_steps=10) == 0.5
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
