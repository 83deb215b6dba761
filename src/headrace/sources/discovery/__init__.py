"""Takes an address, list, pattern or folder, and gives the objects there and their kind."""
