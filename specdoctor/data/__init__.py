"""Data that ships: prompts, text samples."""
