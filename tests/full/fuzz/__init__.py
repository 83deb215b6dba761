"""Fuzz targets: each takes any bytes and checks what a format's reader makes of them, against a slow or foreign reader.

`test_targets.py` runs them over their seeds and some thousand changed ones; `nox -s fuzz` lets atheris look for inputs
that reach new code. A module here is a target if `targets.py` lists it: it has `seeds()` and `check(data)`.
"""
