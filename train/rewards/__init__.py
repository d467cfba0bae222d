"""Rewards of answers: functions of texts, and reward models."""
