"""Calls about runs, checkpoints, sessions and accounts, one module for each family.

runs, checkpoints, sessions, account    one call for each method
bulk                                    one call for many checkpoints
transfers                               downloads and uploads; `_sources` finds the files of a checkpoint
listing                                 iterators over lists of several pages
_base                                   shared parts, and the one way to make a call"""

from __future__ import annotations

from tinker_sync.clients.rest.account import AccountCalls, AdminClient
from tinker_sync.clients.rest.bulk import BulkCalls
from tinker_sync.clients.rest.checkpoints import CheckpointCalls
from tinker_sync.clients.rest.runs import RunCalls
from tinker_sync.clients.rest.sessions import SessionCalls
from tinker_sync.clients.rest.transfers import TransferCalls
from tinker_sync.runtime.naming import names_requests

__all__ = ["AdminClient", "RestClient"]


@names_requests
class RestClient(RunCalls, CheckpointCalls, SessionCalls, TransferCalls, BulkCalls, AccountCalls):
    """A client for runs, checkpoints, sessions and their files. Threads may share it.

    The `iter_...` methods return iterators; the others return futures, and their calls are sent in parallel.
    Clients that are made without a service client, for the same server and key, share their connections.
    `RestClient(service.holder)`, without further arguments, uses the connections of a service client.

    Args:
        base_url: the server; None: `TINKER_BASE_URL`, else the hosted service.
        api_key: the key; None: `TINKER_API_KEY`, else from `TINKER_CREDENTIAL_CMD`, else the stored one.
    """
