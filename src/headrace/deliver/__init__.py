"""Delivery: takes finished slabs, gives ordered batches to `for` and `async for` loops."""
