"""Stage 1 of 4: maps (seed, epoch, position) to a sample. Pure: no reads, no hidden state."""
