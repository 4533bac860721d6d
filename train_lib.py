"""SMP v2's command, the same as ``python -m smp.train``: ``torchrun --nproc_per_node N train_lib.py --model NAME``.

The loop is in ``smp/train/trainer.py``, the settings in ``smp/train/arguments.py``.
"""

import sys

from smp.train.__main__ import command, main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(command())
