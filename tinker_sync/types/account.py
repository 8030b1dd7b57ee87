"""The answers about access to the service: a token, the health of the service, and the caller's identity."""

from __future__ import annotations

from typing import Literal

import attrs

from tinker_sync.types._model import Model, model


@model
class AuthTokenResponse(Model):
    """The answer with a short-lived token, which later requests carry. The repr hides the token.

    >>> AuthTokenResponse(jwt="secret")
    AuthTokenResponse()
    """

    __response__ = True

    jwt: str = attrs.field(repr=False)


@model
class HealthResponse(Model):
    """The answer to a health check: the service is running."""

    __response__ = True

    status: Literal["ok"]


@model
class WhoamiResponse(Model):
    """The caller's identity: user, organization and, for people, an email address.

    >>> WhoamiResponse(user_urn="user-1", org_urn="org-1").email is None
    True
    """

    __response__ = True

    user_urn: str
    org_urn: str
    email: str | None = None
