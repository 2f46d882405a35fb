"""Result files of this and of other tools, each read into the same `ResultSet`: one file = one format.

A reader module has `NAME`, `recognises(source)` and `read(source)`; `load.READERS` lists them.
"""
