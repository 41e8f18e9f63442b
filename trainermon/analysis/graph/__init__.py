"""The graph of a dump: its calls as a tree, the values that flow between them, and what is wrong where."""
