"""Pure arithmetic over records: no torch, no transformers."""
