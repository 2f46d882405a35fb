"""How much of a draft to verify."""
