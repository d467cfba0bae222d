"""What can go wrong with a run, each told in one line that says what to do."""

from ..data.errors import UserError


class RunError(UserError):
    """A run folder that cannot be used as asked."""


class NonFiniteLoss(ArithmeticError):
    """The loss is not a number any more."""


class ToldElsewhere(RunError):
    """What another process met with, and process 0 tells."""
