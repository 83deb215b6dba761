"""States of loaders: their fields, JSON form, checks and merging."""
