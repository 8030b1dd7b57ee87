"""Round trips to a server. The package does not depend on the runtime.

    caller                 the retries: `Tries` decides after each try; `Caller` makes blocking calls
    verdict                the decision about an answer or a failure, by `tinker_sync._policy`
    http, exchange         one attempt: sends it over an idle or a new connection, lets a poller or the
                           caller read the answer, follows redirects
    request                one request to one address: its headers, also encoded as bytes (its head)
    pools                  open connections, kept for reuse
    body                   a large body in pieces, sent in blocks without a copy of the whole
    socket_line            bytes on a socket, framed by `wire.http1`
    content, scheme        compressed bodies; ports that use another scheme than the address
    session                the user's `requests.Session`: proxies, certificates, headers, cookies
    auth, tokens, challenge, credential_command   the key, and tokens in exchange for it
    journal, redact        log lines and events, with secrets masked

Any thread may use these modules. A call belongs to the thread that makes it, an exchange to the thread that
reads it.
"""
