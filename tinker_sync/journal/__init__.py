"""A journal of the requests of a training, so that a script can be restarted after a crash and goes on.

    with ServiceClient(journal="run.journal") as service:
        training = service.create_lora_training_client(MODEL, rank=4, seed=1)
        for step in training.steps(100):
            training.forward_backward(batch(step), "cross_entropy")
            training.optim_step(AdamParams()).result()

A restarted script makes its calls again: all of them, or, if it counts its steps with `steps`, those before
and between loops and those from the step that was under way. Each call gets the number that it had in the
earlier run. The journal distinguishes five cases:

- The server has accepted the call: it is not sent again. Its result is fetched by the recorded request id.
- The call was about to be sent: it is sent with the same number. The server recognises the number and
  executes the call once.
- The server has refused the call, and the script made another one after it: it fails again, with the same
  status, and is not sent. If no other one followed, it is sent again.
- The call is new: it is recorded and then sent.
- The journal has another call under that number: `JournalError`. The script has changed, or does not make the
  same calls; nothing was sent.

If the server no longer has the session, a new one begins and each model is made again. A model starts from
the last checkpoint that `save_state` completed within `steps`, and `steps` continues after it. Without a
checkpoint the model starts from the beginning, and all calls are repeated. A log line lists the repeated
steps. A session that ends with an error or an interrupt stays open at the server for the next run, also if
the script ends within a loop over `steps`, for example by `sys.exit`, without a `with` block or `close`, or
if the end of the client has dropped calls. After a success the session is over, and the next run begins a
new one.

`TrainingClient.recover` makes a client with a model that replaces another. If the model was restored from a
checkpoint of a step, `steps` of the new client begins after that step. If the script is then restarted, it
begins a new session from the last checkpoint of the replacement, or else from the one that the replacement
was restored from.

`ServiceClient.attach(path)` continues without the script. `service.trainings` has the training clients, and
`training.unread` the results that had not arrived. The journal holds no data, so `attach` cannot repeat a
call that may not have reached the server. A harmless request with the same number shows if the call arrived,
and `training.settled` has the outcome.

    file       the file, to which each line of JSON is appended with one system call, and the sessions,
               models and requests that the lines describe
    record     decides for each call if it is sent, and writes the lines
    requests   the bodies of requests: their digests, and what a save makes or replaces
    run        the journal of a service client: its sessions, and the records of its models

The lines name the server, sessions, models, numbers, digests, request ids and checkpoints. They hold no data,
key or token. A written line survives a crash of the process. Lines that name sessions, models and checkpoints
are also synced to the disk, so they survive a crash of the machine. One process at a time may use a journal.
One thread must make the calls of a training client, in the same order in each run.

Threads: those that send requests and take their results write the lines; a lock keeps lines whole. A client
without a journal does not use this package.
"""
