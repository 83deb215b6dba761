"""How samples lie in bytes: plain functions over buffers."""
