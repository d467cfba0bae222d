"""Rewards of completions: functions of texts, and reward models."""
