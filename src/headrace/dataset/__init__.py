"""Data sets and streams as users meet them: base classes, methods and descriptions."""
