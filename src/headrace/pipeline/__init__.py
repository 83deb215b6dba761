"""Compiles a stream's operators into a pipeline, and computes the orders of its epochs."""
