"""`python -m echelon.analysis` works as `fr-analyze`."""

import sys

from echelon.analysis.cli import main

sys.exit(main())
