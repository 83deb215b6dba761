"""Archives with every kind of damage, and what a reader must make of each: the whole samples, then one error.

They are built when this is imported. Nothing here depends on headrace, so that other readers can be asked the same.
"""

from corpus import extended, headers, members, truncated, whole
from corpus.parts import Case, Damage, Sample

CASES: tuple[Case, ...] = (*truncated.CASES, *headers.CASES, *extended.CASES, *members.CASES, *whole.CASES)
GROUPS: dict[str, list[Case]] = {}
for _case in CASES:
    GROUPS.setdefault(_case.name.partition("/")[0], []).append(_case)

__all__ = ["CASES", "GROUPS", "Case", "Damage", "Sample"]
