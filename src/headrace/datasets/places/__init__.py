"""Discovery of the objects at an address: lists, patterns, folders, manifests, formats."""
