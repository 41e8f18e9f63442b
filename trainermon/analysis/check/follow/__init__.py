"""`trainermon check follow`: judges the steps that a running training dumps, as they come."""
