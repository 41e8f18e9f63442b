"""Series leave trainermon here: Prometheus text, the Parquet store."""
