"""Train, resume, finetune or evaluate: ``torchrun --nproc_per_node N -m smp.train --model NAME ...``.

The run from top to bottom: read the flags, plan, join the group, build each part, train.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys

from smp.checkpoint.saver import Saver
from smp.environment import Launch, read_launch
from smp.errors import ConfigError, PeerError, UserError
from smp.faults.agreement import together
from smp.faults.guard import Guard
from smp.faults.lock import lock_directories
from smp.log import configure_logging, get_logger, prepare_streams
from smp.memory.tracker import MemoryTracker
from smp.optim.optimizers import build_optimizer
from smp.parallel.parallelize import prepare_model
from smp.runtime import end_with_launcher, process_group, seed_everything
from smp.train.arguments import ArgumentsError, parse_args
from smp.train.checked_job import CheckedJob, check_job, problems_of_rest
from smp.train.dry_run import planned_launch
from smp.train.evaluate import evaluate
from smp.train.exit import exit_status, print_problems, run_to_end
from smp.train.history import recorded
from smp.train.on_resume import changes_since, with_saved_settings
from smp.train.planned import Planned, dry_run, predict, print_plan
from smp.train.report import announce, arguments_table, begin_files
from smp.train.start import agree_on_start, check_named, prepare_device, restore_start, search_for
from smp.train.trainer import Trainer, finish, train

logger = get_logger("train")


def run(job: CheckedJob, guard: Guard) -> int:
    """Build each part, train, and write what remains; returns the exit status."""
    config, launch = job.config, job.launch
    predicted = predict(job) if config.run.plan and launch.is_main else None
    with (
        process_group(config.comm, launch, job.device, cpu_offload=config.activation.cpu_offload),
        guard.connected(),
        lock_directories([job.run_dir, *job.checkpoint_dirs] if launch.is_main else []),
    ):
        configure_logging(rank=launch.rank, local_rank=launch.local_rank, world_size=launch.world_size, log_dir=None)
        search = search_for(job, functools.partial(agree_on_start, job, guard.enter))
        start = search.first()
        job = with_saved_settings(job, start)
        config = job.config
        prepare_device(job, batch=start.global_batch_size)
        memory = MemoryTracker(job.device, enabled=config.logging.enable_memory_profiling, rank=launch.rank)
        mesh = job.mesh.join(job.device.type)
        model = prepare_model(
            job.model,
            mesh=mesh,
            settings=job.setup.settings,
            dtype=job.dtype,
            device=job.device,
            seed=config.run.seed,
            load_weights=start.checkpoint is None,
            record=functools.partial(memory.record, step=start.progress.step),
        )
        optimizer = build_optimizer(model, config.optim, lr=config.lr.lr, table=job.table, seed=config.run.seed)
        seed_everything(config.run.seed, mesh.loss.rank)
        start = search.fill(start, functools.partial(restore_start, job, mesh, model, optimizer))
        guard.refuse_crash_loop(start.progress.step)
        job.train_data.seek(start.progress.samples, global_batch_size=start.global_batch_size)
        state = dataclasses.replace(start.progress)
        saver = Saver(
            config.checkpoint,
            job.storages,
            model=model,
            optimizer=optimizer,
            model_name=job.model.name,
            first_step=state.step,
            max_steps=start.max_steps,
            begins_from=str(start.checkpoint),
            record=lambda tag: memory.record(tag, state.step),
        )
        together(saver.prepare)
        if job.launch.local_world_size < job.launch.world_size and not config.checkpoint.is_local:
            for storage in job.storages:
                storage.require_shared(job.model.name)
        saver.open_mirrors()
        # All refusals are made: from here on files are written.
        metrics = together(lambda: begin_files(job, start))
        memory.connect(metrics.writers.scalars)
        planned = Planned(job, start.progress.step, predicted)
        setup = dataclasses.replace(job.setup, mesh=mesh)
        trainer = Trainer(job, start, model, optimizer, state, metrics, memory, setup, saver, guard, planned)
        changes = changes_since(start, job, model)
        announce(job, start, model, changes)
        metrics.writers.text("Arguments", arguments_table(config))
        with recorded(job, start, state, guard, changes=changes) as ended:
            with metrics.trackers, saver.finishing(guard.enter):
                status = train(trainer)
            finish(trainer, status)
            ended(status)
    return status


def main(argv: list[str] | None = None) -> int:
    """Run the job; returns the exit status: 0 done, 1 failed, 2 bad input, 75 asked to stop, 130 Ctrl-C."""
    launch = Launch()
    try:
        if sys.flags.optimize > 1:
            raise UserError("-OO or PYTHONOPTIMIZE=2 removes docstrings, which transformers reads: leave it out")
        launch = read_launch()
        end_with_launcher(launch)
        try:
            config = parse_args(argv)
        except ArgumentsError as error:
            raise ConfigError([*error.problems, *problems_of_rest(error, launch)]) from None
        job = check_job(config, planned_launch(config, launch))
        if config.run.dry_run:
            check_named(job)
            dry_run(job)
            if config.run.plan and launch.rank == 0:
                print_plan(job)
            return 0
    except UserError as error:
        # Every rank finds the same problems; one of each host prints them.
        if launch.local_rank == 0 and not isinstance(error, PeerError):
            print_problems(error)
        return 2
    guard = Guard(
        config.faults,
        launch,
        job.device,
        run_dir=job.run_dir,
        timeout=config.comm.distributed_timeout,
    )
    with guard:
        return run_to_end(job, guard, functools.partial(evaluate if config.data.evaluate_only else run, job, guard))


def log_to_console() -> None:
    """Log planning, such as the progress of a conversion, to the console; the log files come with the run."""
    with contextlib.suppress(UserError):  # main raises it again
        launch = read_launch()
        configure_logging(rank=launch.rank, local_rank=launch.local_rank, world_size=launch.world_size, log_dir=None)


def command() -> int:
    """Run the job as a program; returns the exit status."""
    prepare_streams()
    log_to_console()
    return exit_status(main)


if __name__ == "__main__":
    sys.exit(command())
