"""Takes a job and plans of epochs, and builds their chains, sources and specs."""
