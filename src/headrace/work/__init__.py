"""Stage 3 of 4: takes tasks, gives samples written in their places; everything that burns CPU runs here."""
