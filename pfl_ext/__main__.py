"""``python -m pfl_ext``."""

import sys

from .cli import main

sys.exit(main())
