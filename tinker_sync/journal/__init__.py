"""The journal of a training: what a client has sent, so that the same script goes on after any death.

    with ServiceClient(journal="run.journal") as service:
        training = service.create_lora_training_client(MODEL, rank=4, seed=1)
        for step in training.steps(100):
            training.forward_backward(batch(step), "cross_entropy")
            training.optim_step(AdamParams()).result()

A script that is killed is started again, and goes on. It makes its calls again from the first one, or from
the first call of the step that was under way where it counts with `steps`. A call gets the number that it
had, and the journal decides:

- The server has accepted it: it is not sent; its result is asked for by the recorded request id.
- It was about to be sent: it is sent with its number again. The server knows it by that number, and does it
  once.
- It is new: it is recorded, and then sent.
- Another call was made under that number: `JournalError`. The script is not the one that was killed, or it
  does not make the same calls; nothing was sent.

Where the server keeps the session no more, a new one begins. Each model is made anew: from the last
checkpoint that `save_state` acknowledged within `steps`, which then goes on behind that checkpoint; else from
the start, with all its calls. A log line lists the steps that are repeated. A session that ends in an error
or an interrupt stays open at the server for the next run; one that ends well is over, and the next run begins
a new one.

`ServiceClient.attach(path)` goes on without the script: `service.trainings` are the training clients,
`training.unread` the results that had not arrived. The journal holds no data, so a call that may not have
reached the server cannot be sent again there. A harmless request under its number shows whether it did, and
`training.settled` reports it.

    file       lines of JSON, each written with one system call before what it announces happens; torn ones
    history    what the lines mean
    record     decides about calls, and records them

The lines name sessions, models, numbers, digests, request ids and checkpoints. They hold no data, key or
token. A line survives the death of the process at once; lines that name sessions, models and checkpoints are
also synced to the disk, so these survive the machine. One process at a time may use a journal. One thread
makes the calls of a training client, in the same order in each run.

Threads: workers that send write the lines; a lock orders them. A client without a journal never comes here.
"""
