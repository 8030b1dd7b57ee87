"""The exception tree: texts, attributes, copies and pickles of errors."""

from __future__ import annotations

import ast
import copy
import inspect
import json
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import requests
from support.values import for_each

from tinker_sync import errors
from tinker_sync.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    InvalidInputError,
    MissingExtraError,
    RequestErrorCategory,
    RequestFailedError,
    RequestInfo,
    ResponseInfo,
    TinkerError,
    UnsupportedByServerError,
    WireError,
)

KEY = "tml-planted-key-0123456789"
REQUEST = RequestInfo(method="POST", url="https://h/pre/api/v1/asample?x=1", headers={"X-API-Key": KEY})
RESPONSE = ResponseInfo(
    status_code=404, headers={"X-Request-Id": "r-7", "Set-Cookie": "s=1"}, content=b"{}", request=REQUEST
)
DETAILS: dict[str, Any] = {"request": REQUEST, "request_id": "r-1", "attempts": 3}

INSTANCES = [
    TinkerError("m"),
    APIError("m", body={"a": [1]}, **DETAILS),
    APIResponseValidationError("m", response=RESPONSE, body="b", **DETAILS),
    APIStatusError("m", response=RESPONSE, body={"error": "m"}, retry_after_s=2.5, **DETAILS),
    *(
        APIStatusError.from_reply(
            status, {"X-Request-Id": "r"}, b'{"detail": "m"}', request=REQUEST, attempts=2
        )
        for status in (400, 401, 402, 403, 404, 408, 409, 410, 422, 425, 429, 500, 503)
    ),
    APIConnectionError(**DETAILS),
    APITimeoutError(request=REQUEST),
    errors.DeadlineError(request=REQUEST, waited_s=3.5, last_words="queue paused"),
    errors.EarlierCallFailedError("optim_step", 7, "the key was refused"),
    RequestFailedError("m", request_id="r", category=RequestErrorCategory.User),
    InvalidInputError(["one", "two"]),
    WireError("m", path="$.a"),
    errors.ConfigurationError("m"),
    errors.CredentialError("m"),
    UnsupportedByServerError("m", feature="f"),
    MissingExtraError("speed", feature="zstd"),
    errors.BudgetExceededError("m", limit=20.0, spent=19.5, unit="usd"),
    errors.SessionLostError("session-1", "410 Gone"),
    errors.VerificationError("m"),
    errors.ClientClosedError(),
    errors.TokenizerError("m", "org/model"),
    errors.TransferError("m"),
    errors.UnsafeArchiveError("it leads upwards", "../a"),
]


@for_each("error", INSTANCES)
@for_each(
    "reproduce",
    [copy.copy, copy.deepcopy, *(lambda e, p=p: pickle.loads(pickle.dumps(e, p)) for p in range(2, 6))],
)
def test_survives_copying_and_pickling(error: TinkerError, reproduce: Any) -> None:
    again = reproduce(error)
    assert type(again) is type(error)
    assert vars(again) == vars(error)
    assert again.args == error.args
    assert str(again) == str(error)
    assert repr(again) == repr(error)


def test_every_error_has_an_instance_here() -> None:
    made = {type(error) for error in INSTANCES}
    public = {
        value for name, value in vars(errors).items() if name in errors.__all__ and inspect.isclass(value)
    }
    assert {cls for cls in public if issubclass(cls, TinkerError)} == made


def test_no_error_has_a_private_name() -> None:
    """The last line of a traceback begins with the name."""
    found = [
        node
        for path in Path(errors.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and {ast.unparse(base) for base in node.bases} & {*errors.__all__}
    ]
    assert len(found) > 30
    assert [node.name for node in found if node.name.startswith("_")] == []


def test_a_subclass_of_a_user_with_another_constructor_survives() -> None:
    error = pickle.loads(pickle.dumps(OfTheUser(7, note="n")))
    assert (error.number, error.note, str(error)) == (7, "n", "number 7")


class OfTheUser(errors.ConflictError):
    def __init__(self, number: int, *, note: str) -> None:
        super().__init__(f"number {number}")
        self.number, self.note = number, note

    def __str__(self) -> str:
        return self.message


@pytest.mark.parametrize(
    ("status", "name"),
    [
        (400, "BadRequestError"),
        (401, "AuthenticationError"),
        (402, "BillingError"),
        (403, "PermissionDeniedError"),
        (404, "NotFoundError"),
        (408, "APIStatusError"),
        (409, "ConflictError"),
        (410, "APIStatusError"),
        (415, "APIStatusError"),
        (422, "UnprocessableEntityError"),
        (425, "APIStatusError"),
        (429, "RateLimitError"),
        (500, "InternalServerError"),
        (503, "InternalServerError"),
        (599, "InternalServerError"),
    ],
)
def test_leaf_by_status(status: int, name: str) -> None:
    error = APIStatusError.from_reply(status, {}, b"")
    assert (type(error).__name__, error.status_code) == (name, status)


@pytest.mark.parametrize(
    ("content", "message", "body"),
    [
        (b'{"error": "no model", "category": "user"}', "no model", {"error": "no model", "category": "user"}),
        (b'{"detail": "Future failed: oom"}', "Future failed: oom", {"detail": "Future failed: oom"}),
        (
            b'{"type": "RequestFailedResponse", "error_message": "bad"}',
            "bad",
            {"type": "RequestFailedResponse", "error_message": "bad"},
        ),
        (
            b'{"error": {"message": "nested", "code": 3}}',
            "nested",
            {"error": {"message": "nested", "code": 3}},
        ),
        (b'{"detail": {"reason": "odd"}}', '{"reason": "odd"}', {"detail": {"reason": "odd"}}),
        (b"upstream went away\n", "upstream went away", "upstream went away\n"),
        (b"<html><head><title>502 Bad Gateway</title></head></html>", "502 Bad Gateway", ...),
        (b'"just text"', "just text", "just text"),
        (b"[]", "Not Found", []),
        (b"{}", "Not Found", {}),
        (b"", "Not Found", None),
        (b"null", "Not Found", None),
        (b'{"error": ""}', '{"error": ""}', {"error": ""}),
        (b"\xff\xfe", "\ufffd\ufffd", "\ufffd\ufffd"),
        (b"[" * 100_000, ..., ...),
    ],
)
def test_body_forms(content: bytes, message: str, body: Any) -> None:
    error = APIStatusError.from_reply(404, {}, content)
    if message is not ...:
        assert error.message == message
    if body is not ...:
        assert error.body == body
    assert len(str(error)) < 3000


@pytest.mark.parametrize("text", ["<", "<title>", "<title", "< "])
def test_pages_are_read_in_linear_time(text: str) -> None:
    """A page of 64 kB stopped all threads of the process for seconds, at each try."""
    begin = time.process_time()
    APIStatusError.from_reply(502, {}, ("<p>" + text * 100_000).encode())
    assert time.process_time() - begin < 1.0


def test_validation_report_names_each_field() -> None:
    report = {
        "detail": [
            {"type": "missing", "loc": ["body", "seq_id"], "msg": "Field required", "input": {}},
            {"type": "int", "loc": ["body", "data", 3], "msg": "not a number"},
            {"msg": "no place"},
        ]
    }
    error = APIStatusError.from_reply(422, {}, json.dumps(report).encode())
    assert error.message == "body.seq_id: Field required; body.data.3: not a number; no place"


def test_long_reports_are_cut_and_counted() -> None:
    report = {"detail": [{"loc": ["body", n], "msg": "bad"} for n in range(500)]}
    error = APIStatusError.from_reply(422, {}, json.dumps(report).encode())
    assert error.message.endswith("; and 480 more")
    text = APIStatusError.from_reply(500, {}, b"x" * 1_000_000)
    assert text.message.endswith("... (65536 characters)")
    assert text.response is not None
    assert len(text.response.content) == 65536


def test_text_is_something_to_act_on() -> None:
    error = APIStatusError.from_reply(
        401,
        {"x-request-id": "r-9"},
        b'{"detail": "Invalid JWT"}',
        method="POST",
        path="/api/v1/asample",
        attempts=3,
    )
    assert str(error) == (
        "401 Unauthorized: Invalid JWT (POST /api/v1/asample, request r-9, 3 attempts). "
        "Check the API key: the api_key argument, TINKER_API_KEY, or `tinker-sync auth login`."
    )


ELSEWHERE = "http://user:secret@h:8000/pre/api/v1/create_session"
NO_SERVER = "http://***@h:8000/pre answers with {}, as no Tinker server does: check the base URL, "


def told(status: int, kind: str, content: bytes = b"<html>no</html>", url: str = ELSEWHERE) -> str:
    request = RequestInfo(method="POST", url=url)
    return str(APIStatusError.from_reply(status, {"Content-Type": kind}, content, request=request))


@pytest.mark.parametrize("status", [401, 403, 404, 405, 501])
def test_a_page_is_not_blamed_on_the_key_or_the_call(status: int) -> None:
    text = told(status, "text/html; charset=utf-8")
    assert text.endswith(NO_SERVER.format("text/html") + "and what may stand before the server.")
    assert ": no (POST /pre/api/v1/create_session). " in text
    assert "secret" not in text


@pytest.mark.parametrize(
    ("status", "kind"),
    [(404, "application/json"), (404, ""), (429, "text/html"), (401, "text/plain"), (503, "text/html")],
)
def test_other_refusals_may_come_from_a_tinker_server(status: int, kind: str) -> None:
    assert told(status, kind).endswith(type(APIStatusError.from_reply(status, {}, b"")).advice)


def test_plain_text_in_place_of_a_call_is_no_tinker_server() -> None:
    assert NO_SERVER.format("text/plain") in told(404, "text/plain", b"404 page not found")


@pytest.mark.parametrize("tail", ["/v2", "/v1", "/api"])
def test_a_version_in_the_base_url_is_hinted_at(tail: str) -> None:
    text = told(404, "application/json", b'{"detail": "Not Found"}', f"http://h{tail}/api/v1/create_session")
    assert text.endswith(
        f"The base URL ends with {tail}; every call adds /api/v1 by itself, so try without it."
    )


@pytest.mark.parametrize("status", [401, 403, 404, 405])
def test_the_path_of_calls_given_twice_is_hinted_at(status: int) -> None:
    url = "http://h/api/v1/api/v1/create_session"
    text = told(status, "application/json", b'{"detail": "Not Found"}', url)
    assert text.endswith("The base URL ends with /api/v1, which every call adds by itself; leave it out.")


def test_the_text_has_the_time_to_wait() -> None:
    error = APIStatusError.from_reply(429, {}, b"", method="GET", path="/x", attempts=1, retry_after_s=2.5)
    assert str(error) == (
        "429 Too Many Requests (GET /x). Send less at a time, or wait before repeating. "
        "The server asks to wait 2.5 s."
    )


def test_constructor_forms_of_the_reference_client() -> None:
    body = {"error": "m"}
    status = errors.NotFoundError("m", response=RESPONSE, body=body)
    assert (status.status_code, status.response, status.request, status.body) == (
        404,
        RESPONSE,
        REQUEST,
        body,
    )
    assert (status.message, status.request_id) == ("m", "r-7")
    assert APIConnectionError(request=REQUEST).message == "Connection error."
    assert APIConnectionError(request=REQUEST, message="reset").message == "reset"
    assert APITimeoutError(request=REQUEST).message == "Request timed out."
    assert APITimeoutError(request=REQUEST).request is REQUEST
    by_place: Any = APITimeoutError
    assert str(by_place(REQUEST)) == str(APITimeoutError(request=REQUEST))
    assert str(by_place(REQUEST, "slow")) == str(APITimeoutError("slow", REQUEST))
    assert str(by_place(object())).startswith("Request timed out")
    odd = APIResponseValidationError(response=RESPONSE, body=body)
    assert (odd.status_code, odd.response, odd.body) == (404, RESPONSE, body)
    failed = RequestFailedError("m", request_id="r", category=RequestErrorCategory.Server)
    assert (failed.message, failed.request_id, failed.category) == ("m", "r", RequestErrorCategory.Server)


def test_objects_of_http_libraries_are_taken_over_without_their_secrets() -> None:
    sent = requests.Request(
        "POST", "https://me:hidden@h/api/v1/x?sig=abc", headers={"X-API-Key": KEY, "Accept": "*/*"}
    ).prepare()
    answer = requests.Response()
    answer.status_code = 403
    answer._content = f'{{"detail": "no", "saw": "{KEY}"}}'.encode()
    answer.request = sent
    answer.headers["X-Request-Id"] = "r-3"
    error = errors.PermissionDeniedError("m", response=answer, body=None)
    assert error.request is not None
    assert error.response is not None
    assert error.request.url == "https://***@h/api/v1/x?sig=***"
    assert error.request.headers["x-api-key"] == "***"
    assert error.request.headers["accept"] == "*/*"
    assert (error.method, error.path, error.request_id) == ("POST", "/api/v1/x", "r-3")
    assert error.response.json() == {"detail": "no", "saw": "***"}
    assert KEY not in repr(pickle.loads(pickle.dumps(error)).__dict__)


@pytest.mark.parametrize(
    ("value", "member"),
    [
        ("user", RequestErrorCategory.User),
        ("server", RequestErrorCategory.Server),
        ("unknown", RequestErrorCategory.Unknown),
        ("", RequestErrorCategory.Unknown),
        ("brand new", RequestErrorCategory.Unknown),
        (None, RequestErrorCategory.Unknown),
        (RequestErrorCategory.User, RequestErrorCategory.User),
    ],
)
def test_category(value: Any, member: RequestErrorCategory) -> None:
    category = RequestErrorCategory(value)
    assert category is member
    assert str(category) == f"{category}" == category.value == category
    assert pickle.loads(pickle.dumps(category)) is category


def test_invalid_input_lists_all_problems_up_to_a_bound() -> None:
    error = InvalidInputError(f"data[{n}]: bad" for n in range(30))
    assert len(error.problems) == 30
    assert str(error).splitlines()[0] == "30 problems:"
    assert str(error).splitlines()[-1] == "  ... and 10 more"
    assert error.problems[29] == "data[29]: bad"


def test_missing_extra_names_the_command() -> None:
    assert "pip install click rich" in str(MissingExtraError("cli"))
    assert "pip install jinja2" in str(MissingExtraError("chat", feature="chat templates"))
