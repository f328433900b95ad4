"""The gated activation."""
