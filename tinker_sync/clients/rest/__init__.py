"""Everything about runs, checkpoints, sessions and accounts that is no training or sampling."""

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
    """Looks after runs, checkpoints and sessions. Threads may share it.

    Methods return futures; calls go out at once and side by side. Clients for the same server and key share
    their connections.

    Args:
        base_url: the server; None: `TINKER_BASE_URL`, else the hosted service.
        api_key: the key; None: `TINKER_API_KEY`, else the stored one.
    """
