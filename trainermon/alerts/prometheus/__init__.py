"""The same rules for Prometheus, and routes for Alertmanager."""
