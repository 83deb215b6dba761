"""Where samples come from: objects, shards, folders, tables, arrays, tokens, videos, Python data sets."""
