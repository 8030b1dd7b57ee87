"""Default deadlines of calls: long enough for every normal call, but finite."""

from __future__ import annotations

import math
from typing import Final

_HOUR_S: Final = 3600.0

SAMPLE_S: Final = 4 * _HOUR_S
TRAIN_S: Final = 12 * _HOUR_S
SAVE_S: Final = 12 * _HOUR_S
CREATE_S: Final = 12 * _HOUR_S
REST_S: Final = 300.0


def deadline_at(now_s: float, own_s: float | None, clients_s: float | None, usual_s: float) -> float:
    """Return the moment to give up, from the deadline of the call, else of the client, else the usual one.

    >>> deadline_at(100.0, None, 60.0, SAMPLE_S)
    160.0
    """
    if own_s is None:
        own_s = usual_s if clients_s is None else clients_s
    return now_s + own_s if math.isfinite(own_s) else math.inf
