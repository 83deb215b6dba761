"""The operators as methods of data sets. Each returns a stream with one more operator."""
