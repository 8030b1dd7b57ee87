"""The threads of a client and what they share.

The way of a sample, and of a training call:

    sampling.sample()      sample_line, sample     SampleJob: checked, then prepared
      schedule             sample_scheduler        order, rate limit, bytes, number
      submit               poller, transport       the request leaves; the answer is a promise
      poll                 fetcher, retrieval      until the promise has a result
      decode, resolve      sample, futures         on a worker; no step returns into `clients`

    training.optim_step()  training_calls          OrderedCall, PassCall: checked, then prepared
      schedule             send_queue              order and number, chunk by chunk
      submit               training_part, server   blocking, with the retries of `transport.caller`
      poll, decode         fetcher, combine, merge chunks become one result

Glossary: a *request* is what goes on the wire; a *promise* is the server's answer that names a request id; a
*chunk* is a part of a training pass; to *submit* is to send the request that returns a promise; to *poll* is
to ask for a promise's result; to *schedule* is to hold a request until order and limits let it go; the
*policy* is what a status means (`tinker_sync._policy`); a *deadline* is the moment of the clock at which a
call gives up.

What owns what:

    core                   what the clients of one service share: made in order, given to each other
    connection             the address, the keys and the sockets, and what renews them
    server                 the server's settings, asked for once, and what depends on them
    lifecycle              the observers, the calls that have not ended, and the end, in order
    introduction           the first exchange with a server: its settings and its dialect
    session, heartbeat     the session at the server, and the thread that keeps it alive
    workers                the pools: send 8, fetch 16, callback 8, loss 4, create 32, await 32, enter 1
    sample_line            the sampler, the numbers and the form of the bodies of one client's samples
    sample_scheduler       the queue of a client's samples, and the policy for submits that are not taken
    poller, tickets        the thread that watches the sockets of all requests under way, and the timers
    readiness, drain       which sockets are readable; the few workers that read them
    rate_limiter, byte_budget   the limits; samples and chunks wait there
    held_calls             calls on a client that is not ready yet
    session_poll           one poll for all samples of a session, where the server offers that
    exits, _fork           the end of the process; forked children
    naming                 the public method that requests are sent for

Threads: the user's own (they check, prepare and queue), `tinker-enter` (puts training calls into the queue),
`tinker-send-N`, `tinker-fetch-N`, `tinker-callback-N`, `tinker-loss-N`, `tinker-create-N`,
`tinker-await-N`, `tinker-poll`, `tinker-heartbeat`, `tinker-close`. Every lock is a leaf: under a lock there
is no second lock, no I/O and no callback; the suite fails where that is broken.

Steps without a lock rely on operations of the interpreter that are one step, also without a global lock:

    set.add, set.discard, list(set)   the calls of a client that have not ended (`lifecycle`)
    dict.pop, list.pop                what a sample holds, the reaction of a ticket: the one that pops acts
    deque.extend, deque.popleft       the readable sockets that wait for a worker (`poller`)
    reading or setting one attribute or one entry of a dict: a whole tuple replaces another (`sample_bodies`)

`next` of an `itertools.count`, by which numbers and keys are drawn, is one step under the global lock only.
An interpreter without it may draw a number twice; there the counts need a lock.
"""
