"""``smp doctor``: look for what would stop or slow a job, before its first step.

Each rank's checks run in a child process (``__main__.py``), so that a check that hangs or dies is a finding like any
other. ``supervisor.py`` watches the children and brings the ranks' reports together. A file per kind of check: each
function takes a :class:`smp.doctor.check.CheckContext`.
"""
