"""The local store: segments of Parquet, and queries."""
