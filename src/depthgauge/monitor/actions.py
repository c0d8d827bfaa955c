"""What happens when an alarm is raised: log, warn, raise, or call a function."""

import logging
import warnings
from collections.abc import Callable, Sequence

from depthgauge.errors import DepthgaugeError, InputError, unknown_name
from depthgauge.results.monitor_record import Alarm

Action = str | Callable[[Alarm], None]
"""One of `ACTIONS`, or a function of an alarm."""
ACTIONS = ("log", "warn", "raise")
LOGGER = "depthgauge.monitor"
"""The name of the logger that the action `log` writes to."""


class AlarmWarning(UserWarning):
    """The warning that the action `warn` of a monitor gives."""


class AlarmError(DepthgaugeError):
    """The error that the action `raise` of a monitor raises. All alarms are in the log before.

    Attributes:
        alarms: the alarms that began with the last probe.
    """

    def __init__(self, alarms: Sequence[Alarm]) -> None:
        self.alarms = tuple(alarms)
        more = f" ({len(alarms) - 1} more alarms are in the log)" if len(alarms) > 1 else ""
        super().__init__(f"{alarms[0].message}{more}")


def check_action(action: object) -> Action:
    """Return the action if it is one; raise `InputError` otherwise."""
    if callable(action):
        return action
    if not isinstance(action, str):
        raise InputError(
            f"action must be one of {', '.join(ACTIONS)} or a function of an alarm, got {type(action).__name__}"
        )
    if action not in ACTIONS:
        raise unknown_name("action", action, ACTIONS)
    return action


def act(action: Action, alarms: Sequence[Alarm], is_main: bool) -> None:
    """Report alarms. In a distributed run every process raises, so that none waits for the others; one reports.

    Args:
        action: what to do.
        alarms: the alarms that began with this probe.
        is_main: whether this process reports.
    """
    if not alarms:
        return
    if action == "raise":
        raise AlarmError(alarms)
    if not is_main:
        return
    for alarm in alarms:
        if callable(action):
            action(alarm)
        elif action == "log":
            logging.getLogger(LOGGER).warning(alarm.message)
        else:
            warnings.warn(alarm.message, AlarmWarning, stacklevel=4)
