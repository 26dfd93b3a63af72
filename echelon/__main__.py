"""Run the `echelon` command: `python -m echelon`."""

import sys

from echelon.cli import main

sys.exit(main())
