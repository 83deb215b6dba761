"""Reads files of token ids, with or without headers, as windows of tokens."""
