"""Entry point: `python -m echelon.analysis` runs `fr-analyze`."""

import sys

from echelon.analysis.cli import main

sys.exit(main())
