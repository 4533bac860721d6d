"""All checks, in the order in which they run and are shown."""

from __future__ import annotations

from smp.doctor.check import Check
from smp.doctor.devices import check_bf16, check_devices, check_limits, check_memory, check_shared_memory
from smp.doctor.disk import check_disk
from smp.doctor.job import PLAN_SHARE, check_plan
from smp.doctor.network import (
    START_SHARE,
    check_clocks,
    check_end,
    check_exchange,
    check_same_directory,
    check_start,
)
from smp.doctor.system import check_backend_parts, check_environment, check_hostname, check_versions

# Before the process group exists, no rank can spoil a check of another.
CHECKS = (
    Check("versions", check_versions),
    Check("backend parts", check_backend_parts, "host"),
    Check("devices", check_devices),
    Check("bf16", check_bf16, "host"),
    Check("memory", check_memory, "host"),
    Check("shared memory", check_shared_memory, "host"),
    Check("open files", check_limits, "host"),
    Check("environment", check_environment),
    Check("host name", check_hostname, "host"),
    Check("dry run", check_plan, "host", PLAN_SHARE),
    Check("disk", check_disk, "host"),
    Check("start", check_start, "job", START_SHARE),
    Check("exchange", check_exchange, "job"),
    Check("clocks", check_clocks, "job"),
    Check("run directory", check_same_directory, "job"),
    Check("end", check_end, "job"),
)
