"""Runs loaders of headrace's data sets: plans epochs, resumes from states, hosts the engine."""
