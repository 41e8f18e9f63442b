"""What every part of trainermon stands on: values, errors, journal, configuration, spool. No torch at import."""
