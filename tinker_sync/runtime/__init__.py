"""The threads of a client and the objects that they share.

The steps of a sample and of a training call, with the modules that take them:

    sampling.sample()      samples                     SampleJob: checked and prepared; then the flow `sample`
      wait for its turn    admission                   order, slots, bytes, rate limit, capacity of the model
      submit               samples, flows, reactor     sends the request; the answer is a promise
      poll                 polls                       asks until the promise has a result
      decode, resolve      samples, futures            on the reactor's thread, or on a worker that helps it

    training.optim_step()  training                    OrderedCall, PassCall: checked, then prepared
      schedule             send_queue                  order and number, chunk by chunk
      submit               training, reactor           as for samples; `transport.retries.Tries` decides on
                                                       retries
      poll, decode         polls, futures, answers     chunks become one result

Glossary:

    request      one HTTP request
    promise      the server's answer that names a request id; the result of the request comes later
    to submit    to send the request that returns a promise
    to poll      to ask for the result of a promise
    fetch        the retrieval of the result of one promise, in one or more polls
    to schedule  to hold a request until order and limits allow it
    to hold      of a call: to keep it until its client is ready
    to settle    to report the tokens that a result has really used to the limiters
    pass         a `forward` or `forward_backward` call of a training client
    chunk        a part of the data of a pass, sent as one request
    entry        a training call in the send queue, with its requests
    number       the sequence number that the client gives to a sample or to a request of a training call
    part, whole  the future of one request of a call, and the future that combines the parts
    place        of a sample: the share of a limit that it occupies
    row          the description of one call of the API in the table `tinker_sync.wire.endpoints`
    policy       the meaning of each status (`tinker_sync._base.policy`)
    deadline     the moment of the clock at which a call gives up
    limiter      a limit on tokens (`spending`); a rate limiter limits requests (`rate_limiter`)
    recording    a measurement of the time that calls take, by `ServiceClient.explain` or `trace`
    observer     an object that receives the events of a client, such as the usage count
    sampler      a sampling session at the server
    vendor       the company of the hosted service; an open server is any other server
    dialect      the set of calls, fields and encodings that a server supports (`tinker_sync.wire.dialect`)
    facts        the settings and the dialect of a server
    machinery    the objects of a client that depend on the facts: the polls, the admission, the limits
    flow         the life of a call as a generator, which the reactor's thread resumes (`flows`)
    ticket       a request or a timer that the reactor holds

The other modules and their contents:

    client                 the parts that the clients of one service share, made and closed in order; its
                           unfinished calls, the end, and that of the process
    server                 the server's settings, asked for once, and the parts that depend on them; the calls
                           that a thread waits for; the wait after a 402
    handshake              the first exchange with a server: its settings and its dialect; the description
                           that an open server publishes of itself
    session                the session at the server, and the thread that keeps it alive
    workers                the pools: send, fetch, callback, loss, create, await, enter; their sizes
    samples                the life of a sample; the sampler, numbers and bodies of one client's samples
    admission              the one queue of a client's samples, by arrival, and the limits that they wait for
    flows                  the lives of calls as generators, and the queue from which they are resumed
    reactor                the requests under way and the timers; the thread that reads answers, resumes the
                           flows and sends small requests, and the workers that guard and help it
    two_passes             a forward pass, a loss of this process, and a backward pass, as one call
    rate_limiter           the limit that the server's refusals set, shared by clients
    session_poll           one poll for all samples of a session, if the server offers it
    futures, awaiting      the future of a call or of several: its end, its state, and `await`;
                           the log of failures that the user never looks at
    calls                  calls made from the table of endpoints, their answers, and errors without secrets
    spending               limits on the tokens that calls use
    lazy                   values that are made on first use; calls on a client that is not ready yet

Threads: those of the user check calls, and prepare the calls on clients that are ready. `tinker-poll` queues
and sends training calls; a worker does this while `tinker-poll` does not run. Others: `tinker-enter-N`,
`tinker-send-N`, `tinker-rest-N`, `tinker-fetch-N`, `tinker-callback-N`, `tinker-loss-N`, `tinker-create-N`,
`tinker-await-N`, `tinker-log-1`, `tinker-heartbeat`, `tinker-close`. Every lock of these modules is a leaf: a
thread that holds a lock takes no second lock, does no I/O and runs no callback. The tests fail if a lock is
taken under another.

Code without a lock relies on operations that are atomic in the interpreter, also without a global lock:

    set.add, set.discard, list(set)   the calls of a client that have not ended (`client`)
    list.pop                          the action of a ticket (`reactor`), the right to resume flows (`flows`):
                                      the thread that pops acts
    dict[key] = ..., dict.pop         the calls that the end of a client waits for (`client`)
    deque.append, deque.popleft       the steps that wait for the reactor's thread (`reactor`), the jobs
                                      of a pool (`workers`), the calls on a client that is not ready
                                      (`lazy`), the flows that are to be resumed (`flows`)
    deque.append                      the turn of a training call (`send_queue`)
    list.append                       what happens to a call: its callbacks, its begin, its end (`futures`)
    list.append, list.pop, list.remove   the idle threads of a pool (`workers`)
    dict.setdefault                   the first `close` of a client (`client`), the try to make a value
                                      (`lazy`)
    reading or setting one attribute or one entry of a dict: a whole tuple replaces another (`samples`)
    next(numbers())                   numbers and keys (`tinker_sync._base.numbers`)
"""
