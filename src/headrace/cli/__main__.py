"""`python -m headrace.cli`."""

from __future__ import annotations

import sys

from headrace.cli import main

sys.exit(main())
