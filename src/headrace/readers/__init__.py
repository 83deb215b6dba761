"""Takes an epoch's plan, reads the bytes, and gives parts of samples."""
