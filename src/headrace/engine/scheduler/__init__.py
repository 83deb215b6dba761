"""Takes samples as they arrive, gives tasks to workers, and assembles batches in order."""
