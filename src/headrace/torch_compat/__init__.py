"""What must be as torch has it: collation, and how tensors travel. Torch is imported here and in `deliver`."""
