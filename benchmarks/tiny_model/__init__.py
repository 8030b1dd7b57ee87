"""The generator of the built-in base model, run from the root of a checkout.

    OMP_NUM_THREADS=1 python -m benchmarks.tiny_model.make FOLDER    train the model anew (needs torch)
    python -m benchmarks.tiny_model.scores [FOLDER]                  measure the shipped model or another one

    words, stories   the vocabulary, the facts and the stories
    tasks            sums, copies and reversals
    page, corpus     training documents, an endless stream
    scores           accuracy on held-out problems
    make             tokenizer and weights

The package ships the result (`tinker_sync/local/tiny/files`) and needs nothing of this.
"""
