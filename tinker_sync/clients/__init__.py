"""The clients that scripts use. Their methods check arguments; the runtime does the work.

    service                `ServiceClient`: makes the other clients and owns the session
    training, sampling     `TrainingClient`, `SamplingClient`: each is also the future of its creation
    rest/                  `RestClient`, `AdminClient`: runs, checkpoints, sessions, account, transfers, bulk
    _creation, _models     creation of clients in the background; creation of models, new or from checkpoints
    _handles, _shared      handles of samplers for other processes; runtimes that several clients share
    _async                 the `..._async` methods

Threads: any thread may call a client. No method waits while it holds a lock.
"""

from __future__ import annotations
