"""A CPU that traps what it advertises: the first bf16 product is survived."""

import os
import signal

import pytest

from smp import cpu_bf16
from smp.errors import UserError
from smp.runtime import onednn_ceiling


@pytest.fixture
def trapping(monkeypatch):
    """Products die under any ceiling that is not among the survivors, as on a CPU that traps."""
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)

    def use(*survivors):
        def product(size, *_, **__):
            if onednn_ceiling() not in survivors:
                os.kill(os.getpid(), signal.SIGILL)
            return original(size, size)

        original = cpu_bf16.torch.ones
        monkeypatch.setattr(cpu_bf16.torch, "ones", product)

    return use


def test_nothing_changes_where_products_live(monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert cpu_bf16.ensure_bf16_works() is None and onednn_ceiling() is None


def test_a_trapped_instruction_lowers_the_ceiling(trapping, caplog):
    trapping("AVX512_CORE", "AVX2")
    assert cpu_bf16.ensure_bf16_works() == "AVX512_CORE" == onednn_ceiling()
    assert "dies (SIGILL)" in caplog.text


def test_nothing_works(trapping):
    trapping()
    with pytest.raises(UserError, match=r"dies \(SIGILL\) on this CPU with every instruction set: use --bf16 0"):
        cpu_bf16.ensure_bf16_works()
    assert onednn_ceiling() is None


def test_the_users_own_ceiling_is_respected(trapping, monkeypatch):
    trapping("AVX2")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_AMX")
    with pytest.raises(UserError, match="with ONEDNN_MAX_CPU_ISA=AVX512_CORE_AMX: unset it"):
        cpu_bf16.ensure_bf16_works()
    assert onednn_ceiling() == "AVX512_CORE_AMX"


def test_a_wrong_product_is_noticed(monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    original = cpu_bf16.torch.ones
    monkeypatch.setattr(cpu_bf16.torch, "ones", lambda *a, **k: original(*a, **k) * 2)
    with pytest.raises(UserError, match="gives a wrong result"):
        cpu_bf16.ensure_bf16_works()
