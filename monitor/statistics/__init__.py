"""Eight moments of any tensors in one pass, as mergeable float64 rows."""
