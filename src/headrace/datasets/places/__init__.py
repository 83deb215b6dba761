"""What lies at an address: lists, patterns, folders and manifests, and what is thought to be meant."""
