"""Ends a run early, after a signal or after an error in a function that the caller passed.

In both cases, the run first saves the state after the last finished step.
"""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import jax

from ...data.common.errors import StepNotTaken
from ...data.common.progress import LogFn
from ..distributed.multiprocess import all_reduce_max, is_primary
from ..runs.custom import Callback
from ..state import Metrics
from .stop_signals import StopNow, StopRequest

POLL_SECONDS = 0.001
"""The number of seconds between two checks of whether a step has ended."""


class Stopper:
    """Raises StopNow to end the loop; all processes stop before the same step."""

    def __init__(self, request: StopRequest, log: LogFn) -> None:
        self.failure: Exception | None = None
        """The error to raise after the state of the run is saved."""
        self._what = ""
        self._request = request
        self._log = log
        self._is_single = jax.process_count() == 1
        self._greatest = all_reduce_max()
        self._signal = 0

    @property
    def signal(self) -> int:
        """The number of the signal that stopped a process; 0 if no signal stopped a process."""
        return self._signal or self._request.signum

    @property
    def reason(self) -> str:
        """The reason why the run ends, as a text for the user."""
        return self._what or (signal.Signals(self.signal).name if self.signal else "an error")

    def check(self) -> None:
        """Raises StopNow if any process has a reason to stop. This is a collective call."""
        # Take the maximum over processes, so that all processes stop if one has a reason to stop.
        failed, self._signal = self._greatest((self.failure is not None, self._request.signum))
        if failed or self._signal:
            raise StopNow

    def check_local(self) -> None:
        """Raises StopNow if a signal arrived and this is the only process of the run."""
        if self._is_single and self._request.signum:
            raise StopNow

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Lets the first signal interrupt a wait that changes no state."""
        try:
            # With several processes, do not interrupt the wait, because the other processes would
            # wait for this one in the next step.
            self._request.cuts_off = self._is_single
            self.check_local()
            yield
        finally:
            self._request.cuts_off = False

    @contextmanager
    def saving_first(self, what: str, errors: type[Exception] = Exception) -> Iterator[None]:
        """Runs a block; for an error, stores the error and raises StopNow.

        The run then saves its state, so the block must raise these errors before it changes the
        state.

        With several processes, only StepNotTaken is stored, because only this error is raised by
        all processes together. Other errors are raised immediately.

        Args:
            what: a description of the block for the user.
            errors: the class of errors to store.
        """
        try:
            yield
        except errors as error:
            # StepNotTaken wraps the error of a reward function, so store the wrapped error.
            cause = error.__cause__ if isinstance(error, StepNotTaken) else error
            if cause is error and not self._is_single:
                raise
            self.fail(what, cast(Exception, cause))
            raise StopNow from error

    def fail(self, what: str, error: Exception) -> None:
        """Stores the first error that ends the run.

        Args:
            what: a description of the failed operation for the user.
            error: the error, which is raised after the state is saved.
        """
        if self.failure is None:
            notes = getattr(error, "__notes__", ())
            reason = "; ".join([f"{type(error).__name__}: {error}", *notes])
            self.failure, self._what = error, " ".join(f"{what} failed ({reason})".split())

    def wait_for(self, metrics: Metrics) -> None:
        """Waits until the metrics of a step are computed, and logs the first signal."""
        is_logged = False
        # Poll, because Python calls no signal handler during a blocking wait. All jax arrays have
        # `is_ready`, which type checkers do not know.
        while not all(x.is_ready() for x in metrics.values()):  # pyright: ignore
            if self._request.signum and not is_logged:
                name = signal.Signals(self._request.signum).name
                self._log(
                    f"{name}: the run ends after the step in progress; a second signal ends the "
                    "run at once"
                )
                is_logged = True
            time.sleep(POLL_SECONDS)


class Callbacks:
    """Calls the caller's callbacks on the primary process, until a callback fails."""

    def __init__(self, callbacks: Sequence[Callback], stopper: Stopper) -> None:
        self._callbacks = tuple(callbacks)
        self._stopper = stopper

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def __call__(self, step: int, call: Callable[[Callback], None]) -> None:
        """Calls `call(callback)` for each callback, after step `step`."""
        for callback in self._callbacks if is_primary() else ():
            if self._stopper.failure is None:
                try:
                    call(callback)
                except Exception as error:
                    what = f"the callback {type(callback).__name__} after step {step}"
                    self._stopper.fail(what, error)
