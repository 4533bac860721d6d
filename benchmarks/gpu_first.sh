#!/bin/bash
# What one GPU shows in a call of seven minutes and one of four; benchmarks/README.md describes it. PYTHON: the Python that has torch.
set -u
root=$(cd "$(dirname "$0")/.." && pwd) || exit
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec timeout --kill-after=5 590 "${PYTHON:-python3}" -m benchmarks.gpu.run "$@"
