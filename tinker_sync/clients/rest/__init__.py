"""Calls about runs, checkpoints, sessions and accounts.

client       `RestClient`: one method for each call
admin        `AdminClient`: billing and the audit log
bulk         one call for many checkpoints
listing      iterators over lists of several pages
_sources     the files of a checkpoint, for downloads
_base        shared parts, and the one way to make a call
"""

from __future__ import annotations

from tinker_sync.clients.rest.admin import AdminClient
from tinker_sync.clients.rest.client import RestClient

__all__ = ["AdminClient", "RestClient"]
