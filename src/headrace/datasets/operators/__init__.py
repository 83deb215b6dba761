"""Operators on streams as immutable values, from which pipelines are compiled."""
