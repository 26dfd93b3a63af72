"""`python -m echelon` is `echelon`."""

import sys

from echelon.cli import main

sys.exit(main())
