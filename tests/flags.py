"""What the tests of flags share: settings to a built object, and the register of who shows which flag."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import tempfile
import traceback
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from smp.config import Settings
from smp.mesh import resolve_mesh
from smp.models.model_config import resolve_model
from smp.parallel.parallelize import compute_dtype, prepare_model
from smp.runtime import Launch, process_group
from smp.train.arguments import FLAGS, parse_args
from smp.train.checked_job import check_job
from tests.job import LLAMA

ROOT = pathlib.Path(__file__).parent.parent
SYNTHETIC = ["--use_synthetic_data", "1"]
MISTRAL = "--model_type mistral --hidden_width 32 --num_layers 2 --num_heads 4 --intermediate_size 48".split()
MIXTRAL = "--model_type mixtral --hidden_width 32 --num_layers 2 --num_heads 4 --intermediate_size 48".split()
LLAMA3 = [*LLAMA, "--rope_scaling_type", "llama3"]
Words = list[object]
CHECKS: dict[str, Callable[..., None]] = {}

LIVE = [
    name
    for name, flag in FLAGS.items()
    if name == flag.field.name and not flag.field.metadata["only"] and not flag.field.metadata["no_effect"]
]
# By file below tests/, its tests of jobs that show the effect of flags.
SHOWN_BY_JOBS = {
    "faults/test_disk.py": {"test_training_goes_on_if_that_is_asked_for": "on_save_error"},
    "faults/test_nonfinite.py": {"test_a_step_is_left_out_and_the_rest_is_as_without_it": "nonfinite nonfinite_budget"},
    "faults/test_watchdog.py": {"test_one_process_that_hangs_is_ended_with_its_stacks": "watchdog_timeout"},
    "parity/test_expert_balance.py": {
        "test_biases_have_the_same_bits_at_every_layout": "moe_bias_update_rate",
        "test_losses_are_those_of_the_formulas_at_two_ranks": "moe_aux_loss_coeff moe_load_balancing moe_z_loss_coeff",
    },
    "parity/test_text_parts.py": {"test_a_job_trains_the_text_model_and_writes_the_larger_one": "export_text_only"},
    "parity/test_finetune.py": {
        "test_first_loss_is_hugging_faces_own": "hf_pretrained_model_name_or_dir",
        "test_the_seeds_spellings": (
            "finetune finetune_checkpoint_load_dir pretrained_checkpoint_file pretrained_model_name"
        ),
    },
    "resume/test_checkpoint_job.py": {
        "test_asynchronous_checkpoints_are_those_of_their_step": "checkpoint_freq checkpoint_type num_kept_checkpoints",
        "test_one_directory_that_fails_does_not_keep_a_checkpoint_from_the_other": "checkpoint_dir",
        "test_the_best_by_validation_loss_is_kept": "keep_best",
    },
    "resume/test_checkpoint_v1.py": {
        "test_a_script_goes_on_from_a_job_and_a_job_begins_anew_from_the_script": "reset_progress",
    },
    "resume/test_context_parallel_job.py": {
        "test_a_checkpoint_goes_on_at_any_other_layout": "model_dir save_final_model",
    },
    "resume/test_object_store_job.py": {
        "test_a_run_goes_on_from_the_url_on_a_new_machine": "checkpoint_cache_dir",
    },
    "resume/test_train.py": {"test_one_flipped_rng_byte_is_noticed": "resume_from_checkpoint verify_checkpoint"},
    "unit/test_memory_profile.py": {
        "test_a_job_shows_what_holds_the_memory_of_each_rank": "memory_profiling_all_ranks",
    },
}
NO_EFFECT = [name for name, flag in FLAGS.items() if flag.field.metadata["no_effect"] and name == flag.field.name]


def parse(words: Words):
    return parse_args([str(word) for word in words])


def plan_of(words: Words, tmp: pathlib.Path, *, model: Words = LLAMA, data: Words = SYNTHETIC):
    return check_job(
        parse([*model, *data, "--output_dir", tmp / "run", "--data_cache_dir", tmp / "cache", *words]), Launch()
    )


def hf(words: Words, *, model: Words = LLAMA):
    return resolve_model(parse([*model, *SYNTHETIC, *words]).model).hf_config


@contextlib.contextmanager
def one_process(words: Words) -> Iterator[Any]:
    """The sharded model of a run of one process, and its configuration."""
    config = parse([*LLAMA, *SYNTHETIC, *words])
    device = torch.device("cpu")
    with process_group(config.comm, Launch(), device):
        mesh = resolve_mesh(config.parallel, world_size=1, local_world_size=1)
        mesh = mesh.join("cpu")
        resolved = resolve_model(config.model)
        model = prepare_model(
            resolved, mesh=mesh, settings=Settings(
                (config.parallel, config.activation, config.loss, config.lora, config.optim, config.fp8)
            ),
            dtype=compute_dtype(config.precision, device), device=device, seed=config.run.seed, load_weights=True,
        )  # fmt: skip
        yield SimpleNamespace(model=model, config=config)


def blocks(words: Words) -> list[Any]:
    with one_process(words) as built:
        return list(built.model.model.layers)


def prefetched(words: Words, which: str) -> int:
    with one_process(words) as built:
        units = [module for module in built.model.modules() if isinstance(module, FSDPModule)]
        return sum(len(getattr(unit._get_fsdp_state(), which)) for unit in units)


def differs(reading: Callable[[Words], Any], given: Words, expected: Any, base: Words = ()) -> None:  # type: ignore[assignment]
    """The reading with ``base`` alone is another than with ``given`` added, which is the expected one."""
    before, after = reading([*base]), reading([*base, *given])
    assert after == expected and before != expected, (before, after)


_SKIPPED = 77  # as automake's tests


def in_child(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a forked process: one that has trained may not be forked again, which other tests do."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with tempfile.TemporaryFile("w+") as report:
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    test(*args, **kwargs)
                    status = 0
                except pytest.skip.Exception as skipped:
                    report.write(str(skipped))
                    report.flush()
                    status = _SKIPPED
                except BaseException:
                    traceback.print_exc(file=report)
                    report.flush()
                finally:
                    os._exit(status)
            _, status = os.waitpid(child, 0)
            report.seek(0)
            if os.waitstatus_to_exitcode(status) == _SKIPPED:
                pytest.skip(report.read())
            if status:
                pytest.fail(report.read() or f"the test's process ended with {status}", pytrace=False)

    return run


def check(*flags: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a test as the one that shows these flags, and run it in a process of its own."""

    def register(test: Callable[..., None]) -> Callable[..., None]:
        for flag in flags:
            assert flag not in CHECKS, flag
            CHECKS[flag] = test
        return in_child(test)

    return register
