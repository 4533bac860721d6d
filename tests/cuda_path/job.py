"""Training jobs on fake CUDA tensors, from the command line's flags.

Run as a program, in a process with the shim: each line of the input is a folder, a number of ranks and the flags of a
job, which a fork runs; it writes ``log`` and ``report`` to the folder, and its status is a line of the output.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh

from smp.plan import fake_cuda
from smp.plan import world as planned_world
from tests.cuda_path import audit


def _replace(owner: Any, name: str, make: Any, *, static: bool = False) -> None:
    new = make(getattr(owner, name))
    setattr(owner, name, staticmethod(new) if static else new)


def _let_fakes_pass() -> None:
    """Replace what looks at values, or takes a fake tensor for tracing."""

    def on_device(original: Any) -> Any:
        def tensor(data: Any, *, device: Any = None, dtype: Any = None, **kwargs: Any) -> torch.Tensor:
            with unset_fake_temporarily():
                made = original(data, dtype=dtype, **kwargs)
            if kwargs.get("pin_memory"):
                audit.note_pinned(made)
            if device is None or torch.device(device).type == "cpu":
                return made
            return made.to(device)  # from pageable memory: a blocking copy

        return tensor

    planned_world._transformers_is_not_tracing()
    _replace(DeviceMesh, "_concatenate", planned_world._outside, static=True)
    _replace(torch, "tensor", on_device)


STEPS = 3  # the second and the third are alike


class EnoughError(Exception):
    """Ends the run: its last checkpoint would read values."""


def _let_run_pass(mode: FakeTensorMode) -> None:
    """Replace what asks the other ranks, of which there are none, and what draws values; no rank raises a flag."""
    from smp.checkpoint import saver
    from smp.faults.guard import Guard
    from smp.parallel import parallelize
    from smp.parallel.tensor import technique
    from smp.train import __main__ as job
    from smp.train import job as checked

    def with_fake_buffers(build_on_meta: Any) -> Any:
        def build(make: Any) -> Any:
            with unset_fake_temporarily():
                model = build_on_meta(make)
            for module in model.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = mode.from_tensor(buffer)
            return model

        return build

    def unraised(ask: Any) -> Any:
        def begin(guard: Any, **flags: bool) -> Any:
            counts = ask(guard, **flags)
            return lambda: dict.fromkeys(counts(), 0)  # read as in a run; a fake tensor has no values

        return begin

    _replace(Guard, "ask", unraised)
    _replace(parallelize, "build_on_meta", with_fake_buffers)
    parallelize.initialize_ = lambda model, rules, *, seed: None
    parallelize.init_rules = lambda hf_config, *, seed: None
    dist.all_gather_object = lambda everyone, mine, group=None: everyone.__setitem__(
        slice(None), [mine] * len(everyone)
    )
    dist.broadcast_object_list = lambda objects, *args, **kwargs: None
    technique.overlap_obstacle = lambda degree, device_type: ""
    job.process_group = lambda *args, **kwargs: contextlib.nullcontext()
    saver.forecast = lambda directory, nbytes: "fits"  # this machine's disk may be small
    checked.check_host_memory = lambda needed, available: None  # and its memory
    Guard.connected = lambda self: contextlib.nullcontext()
    Guard.refuse_crash_loop = lambda self, step: None


def run(world: int, flags: list[str]) -> dict[str, Any]:
    """Run the job for three steps; returns the audit of each, from its batch to the next one's."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from smp.faults.guard import Guard
    from smp.runtime import Launch
    from smp.train import __main__ as job
    from smp.train import trainer
    from smp.train.arguments import parse_args
    from smp.train.checked_job import check_job

    fake_cuda.install(devices=min(world, 8))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    config = parse_args(flags)
    plan = check_job(config, Launch(0, world, 0, min(world, 8)))
    mode = planned_world.fake_mode()
    _let_fakes_pass()
    _let_run_pass(mode)
    audited_mode, steps, optimizers = audit.Audit(mode), [], []

    def audited(train_step: Any) -> Any:
        def step(model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            optimizers[:] = [optimizer]
            if steps:
                steps[-1] = audited_mode.report()
            if len(steps) == STEPS:
                raise EnoughError
            steps.append({})
            audited_mode.clear()
            fake_cuda.Event.now += 1
            return train_step(model, optimizer, *args, **kwargs)

        return step

    def entered(prepare_model: Any) -> Any:
        def prepare(*args: Any, **kwargs: Any) -> Any:  # the mesh is made before, from real tensors
            modes.enter_context(mode)
            modes.enter_context(audited_mode)
            return prepare_model(*args, **kwargs)

        return prepare

    _replace(trainer, "train_step", audited)
    _replace(job, "prepare_model", entered)
    guard = Guard(config.faults, plan.launch, plan.device, run_dir=plan.run_dir, timeout=60.0)
    with contextlib.suppress(EnoughError), contextlib.ExitStack() as modes:
        job.run(plan, guard)
    devices = {str(value.device) for state in optimizers[0].state.values() for value in state.values()}
    allocator = getattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "unknown")()  # not in torch 2.11
    return {"mesh": str(plan.mesh), "steps": steps, "state": sorted(devices), "allocator": allocator}


def answer(folder: str, world: int, flags: list[str]) -> None:
    """Run a job and end this process, a fork."""
    status = 1
    try:
        log = os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        with open(f"{folder}/report", "w") as file:
            json.dump(run(world, flags), file)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:

    import smp.train.__main__  # noqa: F401  what the jobs would import, each for itself

    for line in sys.stdin:
        if (child := os.fork()) == 0:
            answer(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
