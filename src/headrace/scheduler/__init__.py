"""Schedules the work between the four stages, by counts, bytes and order only."""
