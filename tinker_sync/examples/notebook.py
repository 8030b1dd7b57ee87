"""Write a notebook that trains, samples and shows results."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CELLS = (
    """# Fine-tuning in a notebook

Values show themselves: samples as text with unlikely tokens shaded, metrics and lists as tables, and a
training client with its curve. `base_url="local"` is a server on this machine; leave it out for the hosted
service.""",
    """import tinker_sync as tinker
from tinker_sync import data

service = tinker.ServiceClient(base_url="local")
training = service.create_lora_training_client("tinker-sync/tiny", rank=16, seed=1)
tokenizer = training.get_tokenizer()
service.get_server_capabilities()""",
    """## Before the training""",
    """prompt = tinker.ModelInput.from_text("double: abcd ->", tokenizer)
params = tinker.SamplingParams(max_tokens=12, temperature=0.0, stop=["\\n"])
sampling = training.save_weights_and_get_sampling_client()
before = await sampling.sample(prompt, 1, params)
before""",
    """## Some steps

Calls are made ahead of their results; `await` waits, and can be interrupted.""",
    """import random

rng = random.Random(1)
words = ["".join(rng.choice("abcdef") for _ in range(4)) for _ in range(64)]
doubled = [" " + "".join(2 * letter for letter in word) + "\\n" for word in words]
batch = [
    data.from_completion(f"double: {word} ->", answer, tokenizer) for word, answer in zip(words, doubled)
]
for step in range(STEPS):
    passed = training.forward_backward(batch, "cross_entropy")
    stepped = training.optim_step(tinker.AdamParams(learning_rate=8e-3))
    await stepped
training""",
    """await passed""",
    """## After it""",
    """sampling = training.save_weights_and_get_sampling_client()
after = await sampling.sample(prompt, 1, params)
after""",
    """service.usage()""",
    """## Runs and checkpoints""",
    """saved = await training.save_state("doubled")
rest = service.create_rest_client()
await rest.list_checkpoints(training.model_id)""",
    """await rest.list_training_runs()""",
    """passed""",
    """service.close().result()""",
)


def make_notebook(steps: int = 30) -> dict[str, Any]:
    """Return the notebook as JSON data in the format of Jupyter."""
    cells: list[dict[str, Any]] = []
    for number, text in enumerate(CELLS):
        source = text.replace("STEPS", str(steps)).splitlines(keepends=True)
        if text.startswith("#") or "\n\nValues" in text:
            cells.append({"cell_type": "markdown", "id": f"cell-{number}", "metadata": {}, "source": source})
        else:
            code = {"cell_type": "code", "execution_count": None, "outputs": [], "source": source}
            cells.append({**code, "id": f"cell-{number}", "metadata": {}})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def main(argv: Sequence[str] | None = None) -> Path:
    """Write the notebook to the given file, or to `fine-tuning.ipynb`, and return the path."""
    names = sys.argv[1:] if argv is None else list(argv)
    place = Path(names[0] if names else "fine-tuning.ipynb")
    place.write_text(json.dumps(make_notebook(), indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"wrote {place}; open it with jupyter lab {place}\n")
    return place


if __name__ == "__main__":
    main()
