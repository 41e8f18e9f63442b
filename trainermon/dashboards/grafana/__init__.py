"""Grafana dashboards: as code, as generated JSON, and how they get into a Grafana."""
