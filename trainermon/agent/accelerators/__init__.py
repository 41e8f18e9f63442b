"""Utilisation, memory, power and temperature of the ranks' accelerators, as their driver tells them to the agent."""
