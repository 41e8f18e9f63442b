"""The InfluxDB exporter."""
