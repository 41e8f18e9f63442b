"""Small models of many kinds, on which rules, diagnoses and comparisons are judged."""
