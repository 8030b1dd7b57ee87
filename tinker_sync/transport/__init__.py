"""One round trip to a server. Knows no runtime.

    caller                 a call becomes a reply or a public error: the retries of blocking calls
    verdict                applies `tinker_sync._policy` to an answer, or to the lack of one
    http, exchange         one attempt: send it over an idle connection or a new one, let a poller or the
                           caller read the answer, follow redirects
    request                one request to one address: its headers, and its head, written once for all alike
    pools                  open connections, idle ones to be taken again
    socket_line            bytes on a socket, framed by `wire.http1`
    content, scheme        compressed bodies; ports that speak another scheme than the address
    session                the user's `requests.Session`: proxies, certificates, headers, cookies
    auth, tokens, challenge, credential_command   the key, and tokens in exchange for it
    journal, redact        what is logged, with secrets masked

Threads: any. A call belongs to the thread that makes it, an exchange to the thread that reads it.
"""
