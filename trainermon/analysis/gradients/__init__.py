"""Two runs' gradients compared by their signs: which parameter parts first, at which step, on which rank."""
