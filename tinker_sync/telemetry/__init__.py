"""Telling the service how its client fares, unless that is switched off: what is told, and the sending."""

from __future__ import annotations
