"""The methods of streams and data sets. Each returns a stream with one more operator."""
