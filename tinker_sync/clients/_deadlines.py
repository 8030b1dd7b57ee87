"""Default deadlines of calls, in seconds: long enough for every normal call, but finite."""

from __future__ import annotations

from typing import Final

_HOUR_S: Final = 3600.0

SAMPLE_S: Final = 4 * _HOUR_S
TRAIN_S: Final = 12 * _HOUR_S
SAVE_S: Final = 12 * _HOUR_S
CREATE_S: Final = 12 * _HOUR_S
REST_S: Final = 300.0
