"""`trainermon env`: what two trainings ran on and with, and what of it differs."""
