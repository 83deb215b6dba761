"""Takes tasks and gives samples: processes or threads, and the functions that run in them."""
