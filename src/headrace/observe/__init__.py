"""What a loader has done, where its time goes, and what bounds it."""

from headrace.observe.stats import DeliverStats, FetchStats, LoaderMeters, Stats, WorkStats

__all__ = ["DeliverStats", "FetchStats", "LoaderMeters", "Stats", "WorkStats"]
