"""Counters of a loader, and the analysis of its bottleneck."""

from headrace.observe.stats import DeliverStats, FetchStats, LoaderMeters, Stats, WorkStats

__all__ = ["DeliverStats", "FetchStats", "LoaderMeters", "Stats", "WorkStats"]
