"""QK-norm, RoPE and the write of new keys and values into the cache."""
