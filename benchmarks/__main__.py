"""``python -m benchmarks averaging`` in the source tree; the installed command is ``pfl-ext bench averaging``."""

import sys

from .harness import main

sys.exit(main(sys.argv[1:]))
