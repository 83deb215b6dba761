"""Where samples come from: objects, shards, tables, arrays, tokens and videos."""
