"""`AdminClient`: calls about billing and the audit log."""

from __future__ import annotations

from datetime import date, datetime
from typing import TYPE_CHECKING, Final, Literal

from tinker_sync import types
from tinker_sync._base.naming import names_requests
from tinker_sync.clients._async import async_result
from tinker_sync.clients.rest._base import RestBase
from tinker_sync.errors import InvalidInputError
from tinker_sync.runtime.futures import APIFuture

if TYPE_CHECKING:
    from tinker_sync.types import (
        AuditLogResponse,
        BillingUsageResponse,
        CurrentCheckpointStorageUsageResponse,
    )

AuditEvents = Literal["all", "checkpoints", "projects", "teams", "organizations"]
_AUDIT_EVENTS: Final = ("all", "checkpoints", "projects", "teams", "organizations")


@names_requests
class AdminClient(RestBase):
    """A client for billing and the audit log. Thread-safe.

    `AdminClient(service.holder)`, without further arguments, uses the connections of a service client.

    Args:
        base_url: the server; None: `TINKER_BASE_URL`, else the hosted service.
        api_key: the key; None: `TINKER_API_KEY`, else from `TINKER_CREDENTIAL_CMD`, else the stored one.
    """

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> APIFuture[BillingUsageResponse]:
        """Return the usage in a window of time.

        Args:
            starting_on: the start of the window, inclusive: a datetime or RFC 3339 text.
            ending_before: the end of the window, exclusive.

        >>> import tinker_sync
        >>> from datetime import datetime, timedelta, timezone
        >>> today = datetime.now(timezone.utc).replace(hour=0, minute=0, second=0, microsecond=0)
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     admin = tinker_sync.AdminClient(service.holder)
        ...     used = admin.get_billing_usage(today, today + timedelta(days=1)).result()
        >>> sum(event.event_info.type == "training" for event in used.data) >= 0
        True
        """
        window = types.GetBillingUsageRequest(starting_on=starting_on, ending_before=ending_before)  # type: ignore[arg-type]  # text is converted
        return self._call(
            "get_billing_usage",
            query={"starting_on": window.starting_on, "ending_before": window.ending_before},
        )

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> APIFuture[CurrentCheckpointStorageUsageResponse]:
        """Return the storage that checkpoints use now, of one project or of all.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     saved = training.save_state("final").result()
        ...     admin = tinker_sync.AdminClient(service.holder)
        ...     stored = admin.get_current_checkpoint_storage_usage().result()
        >>> sum(item.size_bytes for item in stored.data) > 0
        True
        """
        return self._call("get_checkpoint_storage_usage", query={"project_id": project_id})

    def get_audit_log(
        self, event_type: AuditEvents = "all", day: date | None = None
    ) -> APIFuture[AuditLogResponse]:
        """Return the audit log of your organization for one day.

        Args:
            event_type: return only events of this kind.
            day: the day in UTC; None: today.

        Raises:
            InvalidInputError: `event_type` is unknown.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     saved = training.save_state("final").result()
        ...     log = tinker_sync.AdminClient(service.holder).get_audit_log("checkpoints").result()
        >>> "checkpoint_created" in [entry.event for entry in log.entries]
        True
        """
        if event_type not in _AUDIT_EVENTS:
            raise InvalidInputError(
                f"event_type: expected one of {', '.join(_AUDIT_EVENTS)}, got {event_type!r}"
            )
        return self._call(
            "get_audit_log",
            query={"event_type": event_type, "day": None if day is None else day.isoformat()[:10]},
        )

    get_billing_usage_async = async_result(get_billing_usage)
    get_current_checkpoint_storage_usage_async = async_result(get_current_checkpoint_storage_usage)
    get_audit_log_async = async_result(get_audit_log)
