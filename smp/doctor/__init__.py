"""``smp doctor``: look for what would stop or slow a job, before its first step.

``supervisor.py`` runs each rank's checks with a time limit and brings the ranks' reports together. A file per kind of
check: each function takes a :class:`smp.doctor.check.CheckContext`.
"""
