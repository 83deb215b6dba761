"""Files of token ids: raw, with a header, with Megatron's index beside them, and others; windows of them as samples."""
