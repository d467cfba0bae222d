"""Trains policies by reinforcement learning: rollouts, rewards and updates."""
