"""Moves work between the four stages: credits, order, life cycle. It knows counts, bytes and order; nothing else."""
