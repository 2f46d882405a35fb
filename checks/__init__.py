"""One file = one check = one code = its own documentation."""
