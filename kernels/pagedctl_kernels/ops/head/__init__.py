"""The output head: hidden states to logits that stay in the internal dtype."""
