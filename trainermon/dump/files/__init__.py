"""The files of a dump: written, read, restored."""
