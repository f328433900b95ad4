"""Edits of logits before sampling: removed tokens, bias and penalties."""
