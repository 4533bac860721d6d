"""``smp doctor``: what would stop or slow a job, looked for before its first step.

Checks run in forked workers, so that one which hangs or dies is a finding like any other (``worker.py``). What a check
finds goes through a pipe to the rank's own process, and from there, with a launcher, through the job's store to rank 0
(``run.py``, ``ranks.py``). A file per kind of check: each function takes a :class:`smp.doctor.room.Room`.
"""
