"""Drafters: one module per algorithm behind one protocol."""
