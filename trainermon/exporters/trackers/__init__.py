"""Exporters to the services in which runs are tracked and compared: Weights & Biases and MLflow."""
