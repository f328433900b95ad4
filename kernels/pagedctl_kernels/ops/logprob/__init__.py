"""The one function that turns a row of logits into a token's logprob."""
