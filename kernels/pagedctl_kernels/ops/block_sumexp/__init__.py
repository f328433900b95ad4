"""Sums of exp over blocks of vocabulary columns: the logprob's partial sums."""
