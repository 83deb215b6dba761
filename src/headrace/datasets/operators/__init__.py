"""What can be done to samples, as plain values: what users call makes these, and pipelines are compiled from them."""
