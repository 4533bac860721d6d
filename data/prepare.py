"""``python -m data.prepare``: the same as ``python -m smp.data.prepare``."""

import sys

from smp.data.prepare import main

if __name__ == "__main__":
    sys.exit(main())
