"""Takes the engine's messages, and gives batches to `for` and `async for` loops, pinned or on a device."""
