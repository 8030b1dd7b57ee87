"""Example programs, each under a hundred lines. All but the notebook draw a curve and return numbers.

    python -m tinker_sync.examples.chat_tuning        chats with an evaluation, checkpoints and a resume
    python -m tinker_sync.examples.rewards            reinforcement learning from a reward
    python -m tinker_sync.examples.preferences        DPO with held-out pairs
    python -m tinker_sync.examples.distillation       a student that learns from a teacher's probabilities
    python -m tinker_sync.examples.evaluation         2,000 prompts, and a run that survives a crash
    python -m tinker_sync.examples.sweep              four learning rates side by side
    python -m tinker_sync.examples.custom_loss        a loss of your own in numpy
    python -m tinker_sync.examples.web_app            a Flask app that samples in its requests
    python -m tinker_sync.examples.notebook           writes a notebook to open

Without arguments they run on the embedded server and its model `tinker-sync/tiny`, in some seconds each.
`--base-url URL --model NAME` selects another server and model; the client finds the key as usual. `--steps N`
sets the number of steps; in `evaluation`, of prompts, and in `web_app`, of requests. `--seed N` decides the
data and the first weights. The notebook takes a file name instead of these options.

The tiny model is trained on these forms of prompts. It continues other prompts as a story:

    Q: 23+45=                              68
    copy: k d m p ->                        k d m p
    reverse: 4719 ->                        9174
    Q: What is the opposite of hot?\\nA:     cold
    a chat: What is 23+45?                 68
"""
