"""`trainermon rl`: what a run of reinforcement learning says of its rollouts."""
