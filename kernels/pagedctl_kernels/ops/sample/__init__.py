"""Truncation and the draw of one token a row."""
