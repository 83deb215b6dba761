"""Runs a loader of headrace's data sets: plans epochs, resumes from states, starts the engine."""
