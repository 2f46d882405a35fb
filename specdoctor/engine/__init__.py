"""The reference engine: sequences, target, KV cache, verification, rounds."""
