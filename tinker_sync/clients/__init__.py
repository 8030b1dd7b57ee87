"""What users see: validation, documentation, and one line of work for each method.

    service                `ServiceClient`: makes the others, owns the session
    training, sampling     `TrainingClient`, `SamplingClient`: futures of themselves
    rest/                  `RestClient`, `AdminClient`: runs, checkpoints, sessions, account, transfers, bulk
    _creation, _models     clients that are made in the background; models, new or from checkpoints
    _handles, _shared      samplers that travel to other processes, and what their copies share
    _twins                 the `..._async` methods

Threads: any thread of the user. Nothing here waits under a lock.
"""

from __future__ import annotations
