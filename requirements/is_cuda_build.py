"""Ends with status 0 if the torch of this environment is a CUDA build (its packages are in cuda.lock), else with 1."""

import importlib.metadata
import sys

needed = importlib.metadata.requires("torch") or []
sys.exit(not any(line.startswith(("cuda", "nvidia")) for line in needed))
