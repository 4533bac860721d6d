"""The process that plans: what it leaves behind, equal answers, and what it says where it cannot plan."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.machinery
import importlib.util
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import masking_utils

from smp.environment.malloc import unused_heap
from smp.errors import ConfigError, DamagedCheckpointError, UserError
from smp.memory.estimate import BASE_CPU_BYTES
from smp.parallel import sharding
from smp.plan import shim, world
from smp.plan.devices import DEVICES, DeviceRow
from smp.plan.plan import plan_layout
from smp.plan.worker import serve, worker
from smp.processes import in_child
from tests.clock import HANG_SECONDS
from tests.job import LLAMA, NEOX

CPU = DEVICES["cpu"]
WORDS = [*LLAMA, "--use_synthetic_data", "1"]
OTHER = [*NEOX, "--use_synthetic_data", "1"]


def plan(ask, words=WORDS, row=CPU):
    (found,) = ask("plan_layouts", [words], nodes=1, local=2, row=row)
    if isinstance(found, UserError):
        raise found
    return found


@pytest.fixture(scope="module")
def ask():
    """The process that most of these tests ask, as it starts in a job of the launcher."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name == "GLIBC_TUNABLES" or name.startswith("MALLOC_")]:
            patch.delenv(name)
        with worker(CPU) as one:
            yield one


def looked_at():
    """What a plan replaces in its own process."""
    return {
        "group": dist.is_initialized(),
        "modes": len(_get_current_dispatch_mode_stack()),
        "attention": F.scaled_dot_product_attention,
        "is_tracing": masking_utils.is_tracing,
        "resize_": torch.UntypedStorage.resize_,
        "collectives": sharding.install_collectives,
        "cuda": torch.cuda.is_available(),
        "generator": torch.get_rng_state().tolist(),
    }


@pytest.mark.full
def test_a_plan_leaves_nothing_behind_and_is_made_again(ask):
    """The second, after another model's and an illegal one, is the first, and so is that of another process."""
    before = looked_at()
    first = plan(ask)
    together = ask("plan_layouts", [OTHER, [*WORDS, "--tensor_parallel_degree", "3"], WORDS], nodes=1, local=2, row=CPU)
    assert together[0] != first and together[2] == first
    assert "divide" in str(together[1]) and "\n" not in str(together[1]).strip()
    here = in_child(functools.partial(plan_layout, WORDS, nodes=1, local=2, row=CPU))
    assert dataclasses.replace(here, memory=first.memory) == first  # malloc is set otherwise here
    assert (here.memory.peak, here.memory.own_peaks) == (first.memory.peak, first.memory.own_peaks)
    assert here.memory.timeline == first.memory.timeline
    assert looked_at() == before
    assert not before["group"] and not before["modes"]


@pytest.mark.full
def test_exchanges_over_all_ranks_are_named_by_the_axis_that_has_them(ask):
    row = DeviceRow("cpu", peak=0.1, bandwidth=0.02, links=4.0, network=1.0)
    words = [*WORDS, "--tensor_parallel_degree", "2", "--distributed_backend", "gloo"]
    step = plan(ask, words, row).step
    assert step.parts["tensor-parallel exchanges"] > 0


@pytest.mark.full
def test_what_a_process_holds_beyond_its_tensors():
    words = [*WORDS, "--distributed_backend", "smddp"]
    memory = in_child(functools.partial(plan_layout, words, nodes=1, local=2, row=CPU)).memory
    assert 0 < memory.shared < memory.peak.total
    assert memory.heap == int(unused_heap(recomputes=True) * (memory.peak.total - memory.shared))
    assert memory.outside == BASE_CPU_BYTES + memory.heap


@pytest.mark.full
def test_one_token_of_a_job_on_gpus_is_planned_here():
    """torch would keep the value of a tensor of one element beside the fake one, and move it to the GPU."""
    words = [*WORDS, "--lora_rank", "2", "--lora_train_tokens", "5"]
    with worker(DEVICES["h100"]) as ask:
        assert plan(ask, words, DEVICES["h100"]).memory.needed


@pytest.mark.full
def test_a_directory_of_the_jobs_hosts_need_not_be_here(ask):
    offloaded = [*WORDS, "--offload_activations", "1"]
    with pytest.raises(UserError, match="--offload_dir"):
        plan(ask, offloaded)
    assert plan(ask, [*offloaded, "--offload_dir", "/nowhere/fast"]).memory.needed


@pytest.mark.full
def test_a_worker_that_dies_is_a_sentence():
    with (
        worker(CPU) as ask,
        pytest.raises(UserError, match="the planning process has ended with status 1: see its output above"),
    ):
        ask("no such call")


def test_the_end_of_the_fork_that_plans_is_a_sentence():
    with pytest.raises(UserError, match=r"the process that planned this layout has ended with status 9\b"):
        in_child(lambda: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.full
def test_the_fork_that_plans_ends_with_its_process():
    code = "import time\nfrom smp.processes import in_child\nin_child(lambda: (print(1, flush=True), time.sleep(1e6)))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"1\n"
        process.kill()
        assert process.communicate(timeout=HANG_SECONDS)[0] == b""  # its output ends when nobody holds it any more


def test_a_defect_is_a_sentence(capfd):
    def fail():
        raise ZeroDivisionError("of a test")

    with pytest.raises(UserError, match=r"could not be planned \(ZeroDivisionError\): this is a defect in smp"):
        in_child(fail)
    assert "of a test" in capfd.readouterr().err  # for the report


def test_a_refusal_in_the_fork_keeps_its_words():
    def refuse():
        raise UserError("give another number")

    with pytest.raises(UserError, match=r"^give another number$"):
        in_child(refuse)


def test_a_fork_keeps_what_it_replaces():
    assert in_child(functools.partial(setattr, masking_utils, "is_tracing", None)) is None
    assert masking_utils.is_tracing is not None


def test_no_gpu_of_a_build_for_cuda_is_asked():
    """Its guard becomes one that does nothing, and no fake tensor touches the device first."""

    def prepare():
        asked = []
        torch._C._ensureCUDADeviceGuardSet = lambda: asked.append("guard")
        world.prepare("cuda", (9, 0), 8, 80 << 30)
        fake_tensor.init_gpu_context(torch.device("cuda"))
        with FakeTensorMode(), torch.device("cuda"):
            one, into = torch.empty(2, 2, dtype=torch.bfloat16), torch.empty(2, 2)
            torch.addmm(into, one, one, out_dtype=into.dtype, out=into)  # torch 2.11 has another operator's fake for it
        return asked

    assert in_child(prepare) == ["guard"]


def test_no_compiler_is_a_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler .* none is on the PATH"), worker(DEVICES["h100"]):
        pass


def test_a_home_that_cannot_be_written_is_a_sentence(monkeypatch, tmp_path):
    (tmp_path / ".cache").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"cannot be kept in .*kernels \(.*\): set HOME to a directory"):
        shim.build_shim()


def test_the_shim_of_another_environment_is_another(monkeypatch, tmp_path):
    """Its library has the path of that environment's torch, which may be gone."""
    spec, made = importlib.util.find_spec("torch"), []
    monkeypatch.setattr(shim, "_compile", lambda torch, source, built: built.write_bytes(bytes(torch)))
    for name in ("one", "other", "one"):
        (tmp_path / name).mkdir(exist_ok=True)
        shutil.copy(f"{spec.submodule_search_locations[0]}/version.py", tmp_path / name)
        place = importlib.machinery.ModuleSpec("torch", None, is_package=True)
        place.submodule_search_locations = [str(tmp_path / name)]
        monkeypatch.setattr(shim, "find_spec", lambda _, place=place: place)
        made.append(shim.build_shim(tmp_path))
    assert made[0] == made[2] != made[1] and made[1].read_text() == str(tmp_path / "other")


def test_a_shim_that_does_not_compile_is_said_with_the_compilers_words(tmp_path):
    if shim.compiler() is None:
        pytest.skip("no C++ compiler")
    source = tmp_path / "shim.cpp"
    source.write_text("no C++\n")
    with pytest.raises(UserError, match=r"does not compile with .*:\n.*shim\.cpp"):
        shim.build_shim(tmp_path, source)
    assert not list(tmp_path.glob("*.so"))


def test_the_worker_ends_when_its_input_does():
    def without_input():
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        serve()

    assert in_child(without_input) is None


def test_errors_are_as_they_were_raised(ask):
    for error in (ConfigError(["one", "two"]), DamagedCheckpointError("at", ["cut", "gone"])):
        again = copy.copy(error)  # by what brings them from one process to another
        assert type(again) is type(error) and (str(again), again.problems) == (str(error), error.problems)
    with pytest.raises(UserError, match=r"no layout could be planned \(TypeError: .*this is a defect in smp"):
        ask("plan_layouts", 3)
