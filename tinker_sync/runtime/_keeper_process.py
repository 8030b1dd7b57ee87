"""The program of the keeper process. `runtime.keeper` starts it and describes its purpose.

It runs as a script, in an interpreter that loads the standard library alone. Lines of JSON arrive on standard
input. The first line has the orders: the request of a heartbeat, its period, and the meanings of statuses.
Each later line reports a heartbeat of the owner: `{}`, or `{"headers": {...}}` if the headers have changed.
The owner is the process that started this one. The end of the input means that the owner is dead. An owner
that no longer needs the keeper kills it.

The main thread sends the heartbeats. The thread `read` reads the lines.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

DEAD = None
"""The last entry of the queue of lines: the owner is dead."""


class Watch:
    """A sender of heartbeats for one session while the owner of the session is silent. For one thread.

    Args:
        orders: the first line of input: the request of a heartbeat, its timing and the meanings of statuses;
            see `runtime.keeper.Keeper`.
        lines: the later lines of input, which may have new headers, and `DEAD` after the last one.
        send: sends a heartbeat with the given headers; returns the status, or 0 if no answer came.
        now: returns monotonic seconds.
    """

    def __init__(
        self,
        orders: dict[str, Any],
        lines: queue.SimpleQueue[Any],
        send: Callable[[dict[str, str]], int],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._orders = orders
        self._lines = lines
        self._send = send
        self._now = now
        self._headers: dict[str, str] = orders["headers"]
        self._known: bool = orders["always_offered"]
        self._refused_at: float | None = None
        self._end_at: float | None = None  # None while the owner lives

    def run(self) -> None:
        """Send heartbeats while the owner is silent.

        Return when a 410 reports that the session is gone, when the server has no call for heartbeats, or
        when the owner has been dead for the `outlive_s` of the orders. Also return if the owner is dead and
        the server has repeated a doubtful status, such as 404, for a while.
        """
        due_at = self._now() + self._orders["silence_s"]
        while True:
            try:
                line = self._lines.get(timeout=max(due_at - self._now(), 0.0))
            except queue.Empty:
                if not self._beat():
                    return
                due_at = self._now() + self._orders["period_s"]
            else:
                if line is DEAD:
                    self._end_at = self._now() + self._orders["outlive_s"]
                    due_at = min(due_at, self._now() + self._orders["period_s"])
                else:
                    self._headers = line.get("headers", self._headers)
                    self._known, self._refused_at = True, None
                    due_at = self._now() + self._orders["silence_s"]

    def _beat(self) -> bool:
        """Send one heartbeat, unless the owner has been dead for the `outlive_s` of the orders.

        Return False if the keeper must end.
        """
        now, orders = self._now(), self._orders
        orphan = self._end_at is not None
        if self._end_at is not None and now >= self._end_at:
            return False
        status = self._send(self._headers)
        if 200 <= status < 300:
            self._known, self._refused_at = True, None
        elif status == orders["gone"] or (not self._known and status in orders["no_such_call"]):
            return False
        elif status in orders["doubtful"]:
            self._refused_at = now if self._refused_at is None else self._refused_at
            # A living owner decides itself whether the session is lost, once it runs again.
            return not (orphan and now - self._refused_at >= orders["certain_after_s"])
        else:
            self._refused_at = None
        return True


def send_with(orders: dict[str, Any]) -> Callable[[dict[str, str]], int]:
    """Return a function that sends one heartbeat at each call, over a new connection.

    The function takes the headers. It returns the status of the answer, or 0 if no answer came.
    """
    target = orders["target"]
    headers_of_proxy: dict[str, str] = {}
    if orders["proxy"] is not None and not orders["tls"]:  # the proxy itself reads the request
        target, headers_of_proxy = orders["address"], orders["proxy"]["headers"]

    def send(headers: dict[str, str]) -> int:
        connection = _connection(orders)
        try:
            connection.request("POST", target, orders["body"].encode(), {**headers, **headers_of_proxy})
            return connection.getresponse().status
        except (OSError, http.client.HTTPException, ValueError):
            return 0
        finally:
            connection.close()

    return send


def _connection(orders: dict[str, Any]) -> http.client.HTTPConnection:
    host, port, proxy, limit_s = orders["host"], orders["port"], orders["proxy"], orders["timeout_s"]
    if not orders["tls"]:
        where = (host, port) if proxy is None else (proxy["host"], proxy["port"])
        return http.client.HTTPConnection(*where, timeout=limit_s)
    context = _context(**orders["tls"])
    if proxy is None:
        return http.client.HTTPSConnection(host, port, timeout=limit_s, context=context)
    through = http.client.HTTPSConnection(proxy["host"], proxy["port"], timeout=limit_s, context=context)
    through.set_tunnel(host, port, proxy["headers"])
    return through


def _context(trusted: str | None, cert: list[str]) -> Any:
    import ssl

    if trusted is None:  # the user has switched the check off
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        folder = os.path.isdir(trusted)
        context = ssl.create_default_context(
            cafile=None if folder else trusted, capath=trusted if folder else None
        )
    if cert:
        context.load_cert_chain(*cert)
    return context


def read(lines: queue.SimpleQueue[Any]) -> None:
    """Parse the lines of standard input and put them into `lines`, with `DEAD` after the last one."""
    rest = b""
    while True:
        try:
            part = os.read(0, 1 << 16)
        except OSError:
            part = b""
        if not part:
            lines.put(DEAD)
            return
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            lines.put(json.loads(line))


def main() -> None:
    lines: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=read, args=(lines,), name="read", daemon=True).start()
    orders = lines.get()
    if orders is not DEAD:
        Watch(orders, lines, send_with(orders)).run()


if __name__ == "__main__":
    try:
        main()
    finally:
        os._exit(0)  # the thread may be reading, which an orderly end would wait for
