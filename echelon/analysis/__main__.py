"""Run `fr-analyze` as `python -m echelon.analysis`."""

import sys

from echelon.analysis.cli import main

sys.exit(main())
