"""``python -m smp``: the ``smp`` command."""

import sys

from smp.cli import main

sys.exit(main())
