"""The engine: requests, blocks, scheduling, and the loop that drives the model."""
