"""Runs one epoch: takes a plan, builds its stages, and sends finished batches as messages."""
