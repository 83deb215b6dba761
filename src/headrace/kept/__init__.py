"""What `.cache()` keeps: samples by their numbers, and what tells the functions that made them from others."""
