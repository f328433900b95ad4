"""A linear layer of the decoder."""
