"""Command line: one thin file per command. No heavy import at module level."""
