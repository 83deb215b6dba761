"""Stage 4 of 4: takes finished slabs, gives ordered batches to a `for` or an `async for`."""
