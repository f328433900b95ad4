"""Proofs about the engine: parity, invariance, planted faults."""
