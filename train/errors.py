"""The errors of a run, each with a message of one line that names the remedy."""

from ..data.errors import UserError


class RunError(UserError):
    """A run folder that cannot be used as requested."""


class NonFiniteLoss(ArithmeticError):
    """The loss is no longer finite."""


class ReportedByPrimary(RunError):
    """An error of another process, which process 0 reports."""


class StepNotTaken(Exception):
    """A function on the host failed before a step changed anything, on all processes.

    The cause is its error.
    """
