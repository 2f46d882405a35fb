"""YAML that a user can copy; the scenario presets are read from here."""
