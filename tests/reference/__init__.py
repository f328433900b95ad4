"""Independent references: written from formulas and raw files, sharing no code with the product."""
