"""Series become alerts here, and alerts become commands."""
