"""Support running the `echelon` command as `python -m echelon`."""

import sys

from echelon.cli import main

sys.exit(main())
