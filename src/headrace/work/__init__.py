"""Stage 3 of 4: takes tasks and writes the samples they make. All CPU-bound work runs here."""
