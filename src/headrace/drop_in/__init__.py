"""Loaders of torch's data sets: the behavior of torch's DataLoader, and economic mode."""
