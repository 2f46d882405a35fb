"""Drivers that run arms over prompts and keep records."""
