"""Make `python -m echelon.store` run `echelon store`."""

from __future__ import annotations

import sys

from echelon.store.server.cli import main

sys.exit(main())
