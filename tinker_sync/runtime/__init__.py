"""The threads of a client and the objects that they share.

The steps of a sample and of a training call, with the modules that take them:

    sampling.sample()      sample_line, sample     SampleJob: checked, then prepared
      schedule             sample_scheduler        order, rate limit, bytes, number
      submit               poller, transport       sends the request; the answer is a promise
      poll                 fetcher, retrieval      asks until the promise has a result
      decode, resolve      sample, futures         on the poller's thread, not back in `clients`

    training.optim_step()  training_calls          OrderedCall, PassCall: checked, then prepared
      schedule             send_queue              order and number, chunk by chunk
      submit               training_part, poller   as for samples; `transport.caller.Tries` decides on retries
      poll, decode         fetcher, combine, answers   chunks become one result

Glossary: a *request* is one HTTP request; a *promise* is the server's answer that names a request id; a
*chunk* is a part of a training pass; to *submit* is to send the request that returns a promise; to *poll* is
to ask for a promise's result; to *schedule* is to hold a request until order and limits allow it; the
*policy* maps a status to its meaning (`tinker_sync._policy`); a *deadline* is the moment of the clock at
which a call gives up; the *vendor's* server is the hosted service, an *open* server is any other one; a
*dialect* is the set of calls, fields and encodings that a server supports (`tinker_sync.wire.dialect`); a
*row* describes one call of the API in the table `tinker_sync.wire.endpoints`; a *ticket* is a request or a
timer that the poller holds; to *hold* a call is to keep it until its client is ready; an *operation* is a
training call in the send queue, and its *parts* are its requests; a server's *facts* are its settings and its
dialect; a *sampler* is a sampling session at the server.

The modules and their contents:

    core                   the parts that the clients of one service share, made in order
    connection             the address, the keys and the sockets, and their renewal
    server                 the server's settings, asked for once, and the parts that depend on them
    lifecycle              the observers, the unfinished calls, and the end of a client, in order
    introduction           the first exchange with a server: its settings and its dialect
    session, heartbeat     the session at the server, and the thread that keeps it alive
    keeper                 the process that keeps it alive while this one is stuck or dead
    workers                the pools: send, fetch, callback, loss, create, await, enter; their sizes
    sample_line            the sampler, the numbers and the body format of one client's samples
    sample_scheduler       the queue of a client's samples, their places under the limits, and the policy for
                           submits the server refuses
    poller, tickets        the requests under way and the timers; the sockets that the thread watches
    poller_thread          that thread, its steps, and the workers that guard and help it; it reads the
                           answers, admits samples and sends small requests
    rate_limiter, byte_budget   the limits; samples and chunks wait there; the sizes of requests
    held_calls             calls on a client that is not ready yet
    session_poll           one poll for all samples of a session, if the server offers it
    naming                 the public method that requests are sent for, the user's line that made a call, and
                           failures that the user never looks at
    exits, _fork           the end of the process; forked children

Threads: those of the user (they check and prepare), `tinker-poll` (queues training calls; `tinker-enter` does
while it does not run), `tinker-send-N`, `tinker-fetch-N`, `tinker-callback-N`, `tinker-loss-N`,
`tinker-create-N`, `tinker-await-N`, `tinker-heartbeat`, `tinker-close`. Every lock is a leaf: a thread that
holds a lock takes no second lock, does no I/O and runs no callback. Tests enforce this.

Code without a lock relies on operations that are atomic in the interpreter, also without a global lock:

    set.add, set.discard, list(set)   the calls of a client that have not ended (`lifecycle`)
    dict.pop, list.pop                resources of a sample, reaction of a ticket: the thread that pops acts
    deque.append, deque.popleft       the steps that wait for the poller's thread (`poller_thread`)
    deque.append                      the turn of a training call (`send_queue`)
    reading or setting one attribute or one entry of a dict: a whole tuple replaces another (`sample_line`)

`next` of an `itertools.count`, which draws numbers and keys, is atomic only under the global lock. An
interpreter without it may draw a number twice; there the counts need a lock.
"""
