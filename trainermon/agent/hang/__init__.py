"""Ranks that stand still or have died: when that is so, what is known of them, who is to blame, and what is left."""
