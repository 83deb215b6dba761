"""The sample cache of `.cache()`: files of samples, and digests of functions and data."""
