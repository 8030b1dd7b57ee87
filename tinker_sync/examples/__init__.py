"""Example programs. Each is one file that runs when it is pasted, and prints what it does.

    python -m tinker_sync.examples.demo               a training that survives a crash: `tinker-sync demo`
    python -m tinker_sync.examples.chat_tuning        chats with an evaluation, checkpoints and a resume
    python -m tinker_sync.examples.rewards            reinforcement learning from a reward
    python -m tinker_sync.examples.agents             an agent with several turns, trained through chats
    python -m tinker_sync.examples.preferences        DPO with held-out pairs
    python -m tinker_sync.examples.distillation       a student that learns from a teacher's probabilities
    python -m tinker_sync.examples.evaluation         2,000 prompts, and a run that survives a crash
    python -m tinker_sync.examples.recovery           a loop that goes on after crashes of the server
    python -m tinker_sync.examples.sweep              four learning rates side by side
    python -m tinker_sync.examples.custom_loss        a loss of your own in numpy
    python -m tinker_sync.examples.web_app            a web app that samples in its requests
    python -m tinker_sync.examples.notebook           copies a notebook to open in Jupyter
    python -m tinker_sync.examples.cluster.processes  samples in many processes

They run on the embedded server and its model `tinker-sync/tiny`, in 5 to 30 seconds each. For another server
and model, copy the file, and change MODEL, RATE and `base_url`.

The tiny model is trained on these forms of prompts. It continues other prompts as a story:

    Q: 23+45=                              68
    copy: k d m p ->                        k d m p
    reverse: 4719 ->                        9174
    Q: What is the opposite of hot?\\nA:     cold
    a chat: What is 23+45?                 68
"""

from __future__ import annotations

import sys

# `python -m tinker_sync.examples.NAME` loads this package first; until NAME runs, sys.argv[0] is "-m".
if sys.argv[:1] == ["-m"] and len(sys.argv) > 1 and not sys.orig_argv[-len(sys.argv)].endswith("notebook"):
    if {"-h", "--help"} & {*sys.argv}:
        print(__doc__)
        sys.exit()
    sys.exit(f"{sys.argv[1]}: an example has no options; copy its file, and change its constants")
