"""AdamW with bf16 moments and with bf16 parameters: the arithmetic, the random bits, and what is refused."""

import dataclasses
import functools
import math
import pathlib
from types import SimpleNamespace

import pytest
import torch

from smp.checkpoint.restore import check_optimizer, is_script
from smp.checkpoint.state import settings_of
from smp.errors import ConfigError, UserError
from smp.mesh import lay_out
from smp.models.parameters import ParameterSpec, ParameterTable
from smp.optim import adamw
from smp.optim.config import OptimConfig
from smp.optim.optimizers import (
    build_optimizer,
    described,
    find_problems,
    kind_of,
    kind_text,
    moved_bytes,
    saved_kind,
    state_bytes,
)
from smp.optim.rounding import parameter_key, random_bits, round_stochastically
from smp.train import start
from tests.job import LLAMA, run_job
from tests.reference import build_reference

BF16 = OptimConfig(param_dtype="bf16")
MOMENTS = OptimConfig(optimizer_state_dtype="bf16")
TABLE = ParameterTable((ParameterSpec("w", (64, 32), 0, "matrix"), ParameterSpec("b", (32,), 0, "vector")))


def trained(config: OptimConfig, steps: int, dtype=torch.float32, skip: tuple[int, ...] = ()):
    """A model and its optimizer after steps with gradients that are given."""
    model = build_reference("llama_tied", dtype)
    optimizer = build_optimizer(model, config, lr=1e-2)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
        optimizer.step(skip=torch.tensor(step in skip))
    return model, optimizer


def test_the_plain_operations_compute_what_torchs_kernel_does(monkeypatch):
    expected, its = trained(OptimConfig(), 5, skip=(2,))
    monkeypatch.setattr(adamw, "_is_fused", lambda *_: False)
    monkeypatch.setattr(adamw, "CHUNK", 100)
    found, mine = trained(OptimConfig(), 5, skip=(2,))
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
        for key, value in mine.state[one].items():
            torch.testing.assert_close(value, its.state[other][key], rtol=1e-6, atol=1e-9)


def test_matrices_of_experts_are_updated_in_parts_alike(monkeypatch):
    def updated(chunk: int) -> tuple[torch.Tensor, int]:
        monkeypatch.setattr(adamw, "CHUNK", chunk)
        most, bits = 0, adamw.random_bits

        def counted(key, step, offsets, shape):
            nonlocal most
            most = max(most, math.prod(shape))
            return bits(key, step, offsets, shape)

        experts = torch.nn.Module()
        generator = torch.Generator().manual_seed(0)
        experts.weight = torch.nn.Parameter(torch.randn(2, 5, 7, generator=generator).bfloat16())
        experts.weight.grad = torch.randn(2, 5, 7, generator=generator).bfloat16()
        with monkeypatch.context() as patched:
            patched.setattr(adamw, "random_bits", counted)
            build_optimizer(experts, BF16, lr=1e-2).step()
        return experts.weight.detach(), most

    whole, _ = updated(1000)
    for chunk in (14, 6):  # a few rows, or a part of one
        found, most = updated(chunk)
        assert torch.equal(found, whole) and most <= chunk


def test_bf16_moments_are_those_in_fp32_rounded_to_the_nearest():
    before, optimizer = trained(MOMENTS, 3)
    parameters = {name: parameter.detach().double() for name, parameter in before.named_parameters()}
    states = {n: {k: v.clone() for k, v in optimizer.state[p].items()} for n, p in before.named_parameters()}
    after, optimizer = trained(MOMENTS, 4)
    for name, parameter in after.named_parameters():
        gradient, state = parameter.grad.double(), optimizer.state[parameter]
        mean = 0.9 * states[name]["exp_avg"].double() + 0.1 * gradient
        square = 0.95 * states[name]["exp_avg_sq"].double() + 0.05 * gradient**2
        decayed = parameters[name] * (1 - 1e-2 * (0.2 if parameter.dim() > 1 else 0))
        update = 1e-2 * (mean / (1 - 0.9**4)) / ((square / (1 - 0.95**4)).sqrt() + 1e-8)
        torch.testing.assert_close(parameter.double(), decayed - update, rtol=1e-6, atol=1e-7)
        for found, exact in ((state["exp_avg"], mean), (state["exp_avg_sq"], square)):
            assert found.dtype == torch.bfloat16 and state["step"] == 4
            # Half of the distance between neighbours, and what fp32 is off by.
            assert ((found.double() - exact).abs() <= exact.abs() * (2**-8 + 1e-6)).all()
            assert (found == exact.bfloat16()).double().mean() > 0.99


@pytest.mark.parametrize("config", [MOMENTS, BF16, OptimConfig(param_dtype="bf16", stochastic_rounding=False)])
def test_an_update_that_is_left_out_changes_nothing(config):
    dtype = torch.bfloat16 if config.param_dtype == "bf16" else torch.float32
    (one, first), (two, second) = trained(config, 3, dtype), trained(config, 4, dtype, skip=(3,))
    for mine, theirs in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert all(torch.equal(first.state[mine][key], second.state[theirs][key]) for key in second.state[theirs])
    assert {value.dtype for state in first.state.values() for k, value in state.items() if k != "step"} == {
        torch.bfloat16
    }


def test_the_random_bits_are_of_seed_name_step_and_position():
    key, step = parameter_key(3, "model.norm.weight"), torch.tensor(7.0)
    for shape, offsets, size in (((50,), (13,), (9,)), ((20, 30), (4, 11), (6, 7)), ((4, 5, 6), (1, 2, 3), (2, 2, 3))):
        full = random_bits(key, step, (0,) * len(shape), shape)
        box = tuple(slice(first, first + count) for first, count in zip(offsets, size, strict=True))
        assert torch.equal(random_bits(key, step, offsets, size), full[box])
        others = [
            random_bits(parameter_key(4, "model.norm.weight"), step, offsets, size),
            random_bits(parameter_key(3, "lm_head.weight"), step, offsets, size),
            random_bits(key, step + 1, offsets, size),
        ]
        assert all((other != full[box]).all() for other in others)
    # They are written down, as a resumed run goes on with them in any later version, on any device.
    assert random_bits(key, step, (70_000, 3), (1, 3)).tolist() == [[904175112, 1066678881, -466702595]]


def test_random_bits_of_neighbours_and_of_steps_are_not_related():
    def uniform(step: int) -> torch.Tensor:
        bits = random_bits(parameter_key(0, "w"), torch.tensor(float(step)), (0, 0), (512, 512))
        return ((bits >> 16) & 0xFFFF).double() / (1 << 16) - 0.5

    one, other = uniform(1), uniform(2)
    pairs = [(one, other), (one[1:], one[:-1]), (one[:, 1:], one[:, :-1]), (one[:, 64:], one[:, :-64])]
    for left, right in pairs:  # five standard deviations of the correlation
        assert abs(float((left * right).mean()) * 12) < 5 / left.numel() ** 0.5
    counts = torch.histc(one, 256, -0.5, 0.5)
    assert abs(float(((counts - 1024) ** 2).sum() / 1024) - 255) < 5 * (2 * 255) ** 0.5


def test_rounding_takes_a_neighbour_and_is_right_in_the_mean():
    fractions = torch.tensor([0.0, 1 / 256, 0.25, 0.5, 0.9])
    lower = torch.tensor([1.0, -3.0, 2.0**-120, 2.0**127])[:, None]
    upper = torch.nextafter(lower.bfloat16(), (2 * lower).clamp(-3.3e38, 3.3e38).bfloat16()).float()
    values = (lower + fractions * (upper - lower))[..., None].expand(-1, -1, 1 << 16).contiguous()
    rounded = round_stochastically(values, random_bits(1, torch.tensor(1.0), (0, 0, 0), values.shape)).float()
    ups = (rounded == upper[..., None]).double().mean(-1)
    assert ((rounded == lower[..., None]) | (rounded == upper[..., None])).all()
    # Five standard deviations of the share of 65536 draws.
    assert ((ups - fractions).abs() <= 5 * (fractions * (1 - fractions) / (1 << 16)).sqrt()).all(), ups
    kept = torch.tensor([0.0, -0.0, 1.5, -float("inf"), float("inf"), 2.0**-133])
    bits = torch.full(kept.shape, -1, dtype=torch.int32)
    assert torch.equal(round_stochastically(kept, bits).float().view(torch.int32), kept.view(torch.int32))
    nan = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)  # what GPUs make
    assert round_stochastically(nan, bits[:1]).isnan().all()


def test_updates_too_small_for_the_nearest_value_count_in_the_mean():
    moved = {}
    for stochastic in (True, False):
        parameter = torch.nn.Linear(4096, 1, bias=False, dtype=torch.bfloat16)
        parameter.weight.data.fill_(1.0)
        config = OptimConfig(param_dtype="bf16", stochastic_rounding=stochastic, weight_decay=0.0)
        optimizer = build_optimizer(parameter, config, lr=1e-4)
        for _ in range(50):
            parameter.weight.grad = torch.ones_like(parameter.weight)
            optimizer.step()
        moved[stochastic] = 1 - float(parameter.weight.detach().double().mean())
    assert moved[False] == 0 and abs(moved[True] - 50e-4) < 3e-4


def test_torchs_kernel_is_taken_where_it_takes_the_dtypes(monkeypatch):
    gpu, cpu = (SimpleNamespace(dtype=torch.float32, device=torch.device(kind)) for kind in ("cuda", "cpu"))
    mixed = torch.__version__ >= "2.13"
    assert adamw._is_fused(gpu, torch.float32) and adamw._is_fused(cpu, torch.float32)
    assert adamw._is_fused(gpu, torch.bfloat16) is mixed and not adamw._is_fused(cpu, torch.bfloat16)
    monkeypatch.setattr(adamw, "_MIXED_SINCE", "99.0")
    assert not adamw._is_fused(gpu, torch.bfloat16)


def test_what_does_not_go_together_is_refused():
    with pytest.raises(ConfigError, match="--stochastic_rounding 1 rounds bf16 parameters and --param_dtype is fp32"):
        OptimConfig(stochastic_rounding=True)
    for flags in ({"optimizer_state_dtype": "bf16"}, {"param_dtype": "bf16"}):
        with pytest.raises(ConfigError, match=r"--beta2 0.999 changes a mean by less .* give at most 0.996"):
            OptimConfig(beta2=0.999, **flags)
    OptimConfig(beta2=0.996, optimizer_state_dtype="bf16")
    table = ParameterTable((ParameterSpec("model.layers.0.mlp.up_proj.weight", (256, 256), 0, "matrix"),))
    for name in ("muon", "adamw_8bit"):
        (said,) = find_problems(table, lay_out(), OptimConfig(param_dtype="bf16", optimizer=name))
        assert f"updated by adamw alone, and {name} updates model.layers.0.mlp.up_proj.weight" in said


def test_a_dry_run_has_bf16_parameters():
    outcome = run_job(*LLAMA, "--use_synthetic_data", 1, "--param_dtype", "bf16", "--bf16", 1, "--dry_run", 1)
    assert "a process on CPUs in bfloat16" in outcome.succeeded().output


def test_a_checkpoint_says_of_what_dtypes_its_state_is():
    assert kind_of(OptimConfig()) == kind_of(OptimConfig(optimizer_state_dtype="fp32")) == {}
    assert kind_of(MOMENTS) == {"optimizer_state_dtype": "bf16"} == saved_kind({"optimizer": kind_of(MOMENTS)})
    assert kind_text(kind_of(BF16)) == "--optimizer_state_dtype bf16 --param_dtype bf16"
    assert kind_of(OptimConfig(param_dtype="bf16", optimizer_state_dtype="fp32")) == {"param_dtype": "bf16"}


def test_a_script_and_a_job_in_bf16_have_one_state(monkeypatch):
    """Its moments are of its parameters' dtype, which tensors say."""
    model = build_reference("llama_tied", torch.bfloat16)
    script = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = {"script": True, "extra": None, "optimizer": settings_of(model, script)}
    assert is_script(run)
    job = {"optimizer": described(BF16)}
    check_optimizer(model, script, job)
    for config in (MOMENTS, OptimConfig(optimizer="muon")):
        with pytest.raises(UserError, match="got AdamW: use the same"):
            check_optimizer(model, script, {"optimizer": described(config)})
    manifest = dataclasses.make_dataclass("Saved", ["run"])(run)
    monkeypatch.setattr(start, "read_usable", lambda *_, **__: manifest)
    read = functools.partial(start.read_saved, pathlib.Path("model-1steps"), local=False, reset=True)
    assert read(BF16).run["optimizer"] == kind_of(BF16)
    with pytest.raises(UserError, match=r"AdamW and the job .*: give --optimizer_state_dtype fp32, or"):
        read(MOMENTS)


def test_bytes_follow_from_the_dtypes():
    assert [state_bytes(TABLE, config) for config in (OptimConfig(), MOMENTS, BF16)] == [8, 4, 4]
    nearest = OptimConfig(param_dtype="bf16", stochastic_rounding=False)
    assert [moved_bytes(TABLE, config) for config in (OptimConfig(), MOMENTS, nearest)] == [44, 36, 22]
    assert moved_bytes(TABLE, BF16) > moved_bytes(TABLE, OptimConfig())  # operation by operation
    mesh = lay_out(1, 2)
    assert adamw.working_bytes(TABLE, mesh, OptimConfig()) == adamw.working_bytes(TABLE, mesh, nearest) == 0
    assert adamw.working_bytes(TABLE, mesh, BF16) == 32 * 64 * 32 // 2
