"""Draft checkpoints in and out, one module a writer."""
