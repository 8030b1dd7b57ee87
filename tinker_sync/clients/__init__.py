"""The clients that scripts use. Their methods check arguments; the runtime does the work.

    service                `ServiceClient`: makes the other clients and owns the session
    training, sampling     `TrainingClient`, `SamplingClient`: each is also the future of its creation
    rest/                  `RestClient`, `AdminClient`: runs, checkpoints, sessions, account, transfers, bulk
    doctor, probing        `examine`: checks of key, address, proxy and clocks; `probe`: what a server offers
    _base                  what they share: the runtime, default deadlines, creation in the background
    _models, _handles      creation of models, new or from checkpoints; samplers for other processes
    _arguments, _async     checks of arguments; the `..._async` methods

Threads: any thread may call a client. No method waits while it holds a lock.
"""

from __future__ import annotations
