"""Names of parameters that are the same in each process: tests that run side by side must have the same names."""

from __future__ import annotations

import re


def name_of(value: object) -> str:
    return re.sub(r"( at )?0x[0-9A-Fa-f]+", "", str(value))
