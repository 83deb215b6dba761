"""Small helpers that know no samples: shared memory, limits of the machine, validation, pickling."""
