"""Operators: each takes a stream and gives a stream. One file per operator or family."""
