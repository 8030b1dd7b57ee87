"""The sending of calls to a server: attempts, retries and credentials. The package does not use the runtime.

    retries                the decision about an answer or a failure, by `tinker_sync._base.policy`; the tries
                           of a call; `Caller`, which makes blocking calls
    http                   one attempt to send a call, over an idle or a new connection, with its redirects;
                           the caller or a reactor (a thread that serves many requests) reads the answer
    request                one request to one address: its headers, also encoded as bytes (its head)
    pools                  open connections, kept for reuse
    body                   a large body in pieces, sent in blocks without a copy of the whole
    uplink                 whether it pays to compress such bodies, by the speed of the line
    content                compressed bodies
    session                the user's `requests.Session`: proxies, certificates, headers, cookies
    auth, tokens, credential_command   the key, and tokens in exchange for it
    journal                log lines and events, with secrets masked
    files                  downloads and uploads of checkpoints, which go on where they stopped

Any thread may use these modules. An exchange belongs to one thread at a time.
"""
