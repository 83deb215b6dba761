"""Loaders of torch data sets: the behavior of torch's DataLoader, and economic mode."""
