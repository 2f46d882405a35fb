"""HTTP clients of running engines."""
