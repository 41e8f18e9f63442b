"""`python -m trainermon` is the command `trainermon`."""

from __future__ import annotations

import sys

from trainermon.cli import main

if __name__ == "__main__":
    sys.exit(main())
