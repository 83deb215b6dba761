"""Sources of samples: objects, shards, tables, arrays, tokens and videos."""
