"""Lines of source code and the calls of a dump: from a call to its line, and from a line to its calls."""
