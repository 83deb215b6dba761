"""Scaled pixels are the same by torch and by Pillow, whatever the sizes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.formats.media import by_pillow, by_torch, scaled, torch_is_fast

LENGTHS = st.integers(1, 70)


@pytest.mark.skipif(not torch_is_fast(), reason="torch is not used here: this processor has no AVX2")
@given(LENGTHS, LENGTHS, LENGTHS, LENGTHS, st.booleans(), st.integers(0, 99))
def test_torch_and_pillow_differ_by_one_at_most(
    height: int, width: int, to_height: int, to_width: int, is_gray: bool, seed: int
) -> None:
    shape = (height, width) if is_gray else (height, width, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    one, other = by_torch(pixels, (to_height, to_width)), by_pillow(pixels, (to_height, to_width))
    assert one.shape == other.shape == (to_height, to_width, *shape[2:])
    assert one.dtype == other.dtype == np.uint8
    assert np.abs(one.astype(int) - other).max() <= 1
    assert one.flags.c_contiguous
    assert one.flags.writeable


@pytest.mark.parametrize(("shape", "size"), [
    ((100_000, 1), (1, 1)), ((1, 100_000), (1, 3)), ((1000, 1000, 3), (1, 1)), ((2, 3, 3), (900, 700)),
])  # fmt: skip
def test_extreme_scaling_equals_pillow(shape: tuple[int, ...], size: tuple[int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    assert np.abs(scaled(pixels, size).astype(int) - by_pillow(pixels, size)).max() <= 1


def test_scaling_keeps_a_single_colour() -> None:
    for size in ((3, 5), (300, 200)):
        assert (scaled(np.full((31, 47, 3), 255, np.uint8), size) == 255).all()


def test_array_of_the_right_size_is_returned() -> None:
    pixels = np.zeros((4, 5, 3), np.uint8)
    assert scaled(pixels, (4, 5)) is pixels
