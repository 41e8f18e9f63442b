"""What holds for every test: properties are searched the same way on every machine, however slow it is."""

from hypothesis import HealthCheck, settings

settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("nightly", deadline=None, max_examples=2000)
settings.load_profile("ci")
