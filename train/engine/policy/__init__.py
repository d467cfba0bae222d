"""The training of policies: rollouts, rewards and updates."""
