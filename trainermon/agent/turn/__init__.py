"""What the agent's loop does in a turn, and the states that it goes through."""
