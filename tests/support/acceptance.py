"""A script that makes every call of the clients that has an endpoint, against a server that really computes.

It runs with the reference client or with this package, because both have the same names. It checks some
results itself, and prints all that must be equal, so that a test can compare the two clients.

    python -m support.acceptance tinker|tinker_sync URL KEY [--json] [--torch] [--no-exchange]
"""

from __future__ import annotations

import datetime as dt
import hashlib
import importlib
import json
import logging
import os
import pickle
import re
import sys
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from interop.acceptance_script import plain

BASE = "tinker-sync/tiny"
WAIT_S = 120.0
HOUR = dt.timedelta(hours=1)

# The id of a promise contains the number of earlier promises. This number is masked, because the clients need
# different numbers of requests to make a model.
_ID = re.compile(r"req-[0-9a-f]{8}-\d+")
_COPY = re.compile(r":copy:[0-9a-f]{16}")
_MOMENTS = frozenset(
    {"time", "last_request_time", "expires_at", "created_at", "timestamp", "bucket_start", "bucket_end"}
)


class Acceptance:
    """One run of the script.

    Args:
        package: "tinker" or "tinker_sync".
        url: the address of the server.
        key: its key.
        newer: True if the server has the newest protocol, False if it takes JSON only.
        torch: True to make the calls that need torch.
        exchange: True if the server exchanges keys for tokens.
        options: options of the service clients.
    """

    def __init__(
        self,
        package: str,
        url: str,
        key: str,
        *,
        newer: bool = True,
        torch: bool = False,
        exchange: bool = True,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.tinker = importlib.import_module(package)
        self.types = importlib.import_module(f"{package}.types")
        self.url, self.key = url, key
        self.newer, self.torch, self.exchange = newer, torch, exchange
        self.own = package != "tinker"
        self.options = options or {}
        self.results: list[tuple[str, Any]] = []
        self.to_close: list[Any] = []

    # ------------------------------------------------------------------------------------ small tools

    def note(self, name: str, value: Any) -> Any:
        """Record a result that must be the same with the other package. Return the result."""
        self.results.append((name, _without_chance(plain(value))))
        return value

    def wait(self, name: str, future: Any) -> Any:
        return self.note(name, future.result(timeout=WAIT_S))

    def ready(self, client: Any) -> Any:
        """Return a client when it is ready, so that clients are made in the order of the script."""
        return client.result(timeout=WAIT_S) if hasattr(type(client), "result") else client

    def refused(self, name: str, call: Callable[[], Any], says: str, status: int | None = None) -> None:
        """Check that the server refuses a call, with an error that matches `says`."""
        error = self.failure_of(name, call)
        found = {"status": getattr(error, "status_code", None)}
        if hasattr(error, "category"):
            found["category"] = str(error.category.value)
        assert re.search(says, str(error)), f"{name}: {error!r}"
        assert found["status"] == status, f"{name}: {error!r}"
        self.note(name, found)

    def failure_of(self, name: str, call: Callable[[], Any]) -> Any:
        try:
            made = call()
            if hasattr(made, "result"):
                made = made.result(timeout=WAIT_S)
        except Exception as error:  # noqa: BLE001  # it is what was wanted
            return error
        raise AssertionError(f"{name}: not refused but answered with {made!r}")

    def datum(self, tokens: list[int], **inputs: Any) -> Any:
        given = inputs or {"weights": [1.0] * (len(tokens) - 1)}
        return self.types.Datum(
            model_input=self.types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], **given},
        )

    def service(self, **options: Any) -> Any:
        return self.tinker.ServiceClient(
            **{"base_url": self.url, "api_key": self.key, **self.options, **options}
        )

    # ------------------------------------------------------------------------------------ all calls

    def run(self) -> list[tuple[str, Any]]:
        with self.service(display_name="acceptance", user_metadata={"run": "1"}, project_id="p-1") as client:
            self.note("capabilities", client.get_server_capabilities())
            trainer = self.ready(
                client.create_lora_training_client(BASE, rank=4, seed=3, user_metadata={"a": "b"})
            )
            self.training(client, trainer)
            self.checkpoints(client, trainer)
            sampler = self.ready(client.create_sampling_client(base_model=BASE))
            self.sampling(client, trainer, sampler)
            self.refusals(client, trainer, sampler)
            if self.newer:
                self.words(trainer)
                self.custom(client, trainer)
                self.rest(client, trainer, sampler)
                self.admin()
        if self.own:  # otherwise they would live until the process ends
            for client in self.to_close:
                client.holder.close().result(timeout=WAIT_S)
        return self.results

    # ------------------------------------------------------------------------------------ training

    def training(self, client: Any, trainer: Any) -> None:
        types = self.types
        info = self.note("info", trainer.get_info())
        assert (info.model_data.model_name, info.lora_rank, info.is_lora) == (BASE, 4, True)
        data = [self.datum([5, 6, 7, 8, 9]), self.datum([20, 21, 22])]
        before = self.wait("forward", trainer.forward(data, "cross_entropy")).metrics["loss:sum"]
        losses = []
        for step in range(8):
            backward = trainer.forward_backward(data, "cross_entropy")
            optim = trainer.optim_step(types.AdamParams(learning_rate=0.02, grad_clip_norm=5.0))
            losses.append(backward.result(timeout=WAIT_S).metrics["loss:sum"])
            self.wait(f"step {step}", optim)
        self.note("losses", losses)
        assert losses[0] == before
        assert losses[-1] < 0.5 * losses[0], losses
        self.losses(trainer)
        other = self.ready(client.create_lora_training_client(BASE, 2, train_mlp=False, train_unembed=False))
        self.wait("other model", other.forward_backward(data, "cross_entropy"))
        self.wait("other step", other.optim_step(types.AdamParams()))
        self.many(trainer)

    def losses(self, trainer: Any) -> None:
        """Make a pass with each loss, and then one step with the sum of their gradients."""
        tokens = [30, 31, 32, 33]
        scored = trainer.forward([self.datum(tokens)], "cross_entropy").result(timeout=WAIT_S)
        logprobs = scored.loss_fn_outputs[0]["logprobs"].to_numpy()
        inputs = {
            "logprobs": np.asarray(logprobs, dtype=np.float32),
            "advantages": np.array([1.0, -0.5, 2.0], dtype=np.float32),
        }
        exact = trainer.forward([self.datum(tokens, **inputs)], "importance_sampling").result(timeout=WAIT_S)
        assert abs(exact.metrics["loss:sum"] + 2.5) < 1e-3  # the ratios are 1
        for loss, config in {
            "importance_sampling": None,
            "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
            "cispo": None,
            "dro": {"beta": 0.1},
        }.items():
            given = trainer.forward_backward([self.datum(tokens, **inputs)], loss, loss_fn_config=config)
            self.wait(loss, given)
        mask = {**inputs, "sequence_ratio_mask": np.ones(3, dtype=np.float32)}
        if self.newer:  # other servers lack the input of this loss, and tensors of two dimensions
            config = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
            gspo = self.types.Datum(
                model_input=self.types.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={"target_tokens": tokens[1:], **mask},
            )
            self.wait("gspo", trainer.forward_backward([gspo], "gspo", config))
            self.wide_targets(trainer)
            self.stable_reinforce(trainer)
        self.wait("after the losses", trainer.optim_step(self.types.AdamParams(learning_rate=1e-4)))

    def stable_reinforce(self, trainer: Any) -> None:
        """Check the loss that takes the log-probabilities of recorded samples, whose ratios are 1 here."""
        types = self.types
        sampler = trainer.save_weights_and_get_sampling_client(record_stability_info=True)
        prompt, params = [30, 31], types.SamplingParams(max_tokens=3)
        sampled = sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result(timeout=WAIT_S)
        [sequence] = sampled.sequences
        count, name = len(sequence.tokens), sequence.sequence_id
        whole = [*prompt, *sequence.tokens]
        datum = types.Datum(
            model_input=types.ModelInput.from_ints(whole[:-1]),
            loss_fn_inputs={
                "target_tokens": np.array(whole[1:]),
                "logprobs": np.array([0.0, *sequence.logprobs], dtype=np.float32),
                "advantages": np.array([0.0] + [1.0] * count, dtype=np.float32),
            },
        ).with_provenance(
            model_input=[
                types.PromptProvenanceSpan(sequence_id=name, length=2),
                types.SampledProvenanceSpan(sequence_id=name, length=count - 1),
            ],
            loss_fn_inputs=[
                types.PromptProvenanceSpan(sequence_id=name, offset=1, length=1),
                types.SampledProvenanceSpan(sequence_id=name, length=count),
            ],
        )
        passed = trainer.forward_backward([datum], "stable_reinforce").result(timeout=WAIT_S)
        assert abs(passed.metrics["loss:sum"] + sum(sequence.logprobs)) < 1e-2

    def wide_targets(self, trainer: Any) -> None:
        """Check that several weighted targets at a position give equal losses, dense and sparse."""
        types = self.types
        prompt = types.ModelInput.from_ints([40, 41, 42])
        dense = types.Datum(
            model_input=prompt,
            loss_fn_inputs={
                "target_tokens": np.array([[41, 50], [42, 0], [43, 51]]),
                "weights": np.array([[0.5, 0.5], [1.0, 0.0], [0.25, 0.75]], dtype=np.float32),
            },
        )
        crow, col = [0, 2, 3, 5], [0, 1, 0, 0, 1]
        shape = {"shape": [3, 2], "sparse_crow_indices": crow, "sparse_col_indices": col}
        sparse = types.Datum(
            model_input=prompt,
            loss_fn_inputs={
                "target_tokens": types.TensorData(data=[41, 50, 42, 43, 51], dtype="int64", **shape),
                "weights": types.TensorData(data=[0.5, 0.5, 1.0, 0.25, 0.75], dtype="float32", **shape),
            },
        )
        both = [
            self.wait(f"wide {name}", trainer.forward([datum], "cross_entropy")).metrics["loss:sum"]
            for name, datum in (("dense", dense), ("sparse", sparse))
        ]
        assert abs(both[0] - both[1]) < 1e-4

    def many(self, trainer: Any) -> None:
        """Make a pass over a batch of many chunks, and submit a step before its result has arrived."""
        data = [self.datum([n % 90 + 1, *range(1, n % 7 + 3)]) for n in range(40)]
        backward = trainer.forward_backward(data, "cross_entropy")
        step = trainer.optim_step(self.types.AdamParams(learning_rate=1e-4))
        output = backward.result(timeout=WAIT_S)
        assert [len(each["logprobs"].data) for each in output.loss_fn_outputs] == [
            n % 7 + 2 for n in range(40)
        ]
        self.note("many", output)
        self.wait("step of many", step)

    def words(self, trainer: Any) -> None:
        """Use the tokenizer that the server names, and check that `raise_if_tinker_not_accessible` passes."""
        tokenizer = trainer.get_tokenizer()
        ids = self.note("tokens", list(tokenizer.encode("The cat sat. 12+30=42")))
        assert tokenizer.decode(ids) == "The cat sat. 12+30=42"
        os.environ.update(TINKER_BASE_URL=self.url, TINKER_API_KEY=self.key)
        try:
            self.tinker.auth.raise_if_tinker_not_accessible()
        finally:
            del os.environ["TINKER_BASE_URL"], os.environ["TINKER_API_KEY"]

    def custom(self, client: Any, trainer: Any) -> None:
        """Train with custom losses, one that this process computes and one that is traced."""
        if not self.torch:
            return

        def loss(data: Any, logprobs: Any) -> Any:
            total = sum((each**2).sum() for each in logprobs)
            return total, {"mine": float(total.detach())}

        data = [self.datum([5, 6, 7, 8])]
        result = self.wait("custom", trainer.forward_backward_custom(data, loss))
        assert abs(result.metrics["mine"] - result.metrics["loss:sum"]) < 1e-4
        self.wait("custom step", trainer.optim_step(self.types.AdamParams(learning_rate=1e-4)))

        def traced(logprobs: Any, weights: Any) -> Any:
            total = -(logprobs * weights).sum()
            return total, {"custom/nll:sum": total}

        handle = client.create_custom_loss(traced, {"logprobs": 1, "weights": 1}).result(timeout=WAIT_S)
        wanted = trainer.forward(data, "cross_entropy").result(timeout=WAIT_S).metrics["loss:sum"]
        found = self.wait("traced", trainer.forward_backward_custom(data, handle))
        assert abs(found.metrics["loss:sum"] - wanted) < 1e-3

    # ------------------------------------------------------------------------------------ checkpoints

    def checkpoints(self, client: Any, trainer: Any) -> None:
        data = [self.datum([5, 6, 7, 8, 9])]
        state = self.wait("save", trainer.save_state("first"))
        self.wait("save all", trainer.save_state("second", ttl_seconds=3600, user_metadata={"at": "2"}))
        if self.newer:
            self.wait("overwrite", trainer.save_state("first", overwrite=True))
            self.wait("external", trainer.save_weights_external("export"))
        self.wait("for a sampler", trainer.save_weights_for_sampler("served", 7200))
        wanted = trainer.forward(data, "cross_entropy").result(timeout=WAIT_S).metrics["loss:sum"]
        # Models from the checkpoint give the same loss. After one more step, the model that was restored with
        # the optimizer's state still gives the same loss as the first one, and the other model does not.
        again = self.ready(client.create_training_client_from_state_with_optimizer(state.path))
        fresh = self.ready(
            client.create_training_client_from_state(state.path, user_metadata={"from": "first"})
        )
        for one in (again, fresh):
            assert one.forward(data, "cross_entropy").result(timeout=WAIT_S).metrics["loss:sum"] == wanted
        adam = self.types.AdamParams(learning_rate=0.01)
        after = []
        for one in (trainer, again, fresh):
            one.forward_backward(data, "cross_entropy").result(timeout=WAIT_S)
            one.optim_step(adam).result(timeout=WAIT_S)
            after.append(one.forward(data, "cross_entropy").result(timeout=WAIT_S).metrics["loss:sum"])
        self.note("after a step", after)
        assert after[0] == after[1] != after[2]
        self.wait("load", trainer.load_state(state.path))
        self.wait("load all", trainer.load_state_with_optimizer(state.path))
        assert trainer.forward(data, "cross_entropy").result(timeout=WAIT_S).metrics["loss:sum"] == wanted

    # ------------------------------------------------------------------------------------ sampling

    def sampling(self, client: Any, trainer: Any, sampler: Any) -> None:
        types = self.types
        prompt = types.ModelInput.from_ints([5, 6, 7])
        greedy = types.SamplingParams(max_tokens=6, temperature=0.0, seed=1)
        path = f"tinker://{trainer.model_id}/sampler_weights/served"
        served = self.ready(client.create_sampling_client(model_path=path))
        from_trainer = self.ready(trainer.create_sampling_client(path))
        unsaved = self.ready(trainer.save_weights_and_get_sampling_client())
        texts = [
            self.wait(name, each.sample(prompt, 1, greedy)).sequences[0].tokens
            for name, each in {"served": served, "from trainer": from_trainer, "unsaved": unsaved}.items()
        ]
        assert texts[0] == texts[1] == texts[2]
        untrained = self.wait("untrained", sampler.sample(prompt, 1, greedy)).sequences[0].tokens
        assert list(untrained) != list(texts[0])
        self.note("base", [sampler.get_base_model(), served.get_base_model(), unsaved.get_base_model()])
        self.seeds(sampler, prompt)
        self.stops(sampler, prompt)
        self.told(sampler)
        if self.newer:
            self.told_more(sampler)
            self.elsewhere(served, prompt, greedy, texts[0])
        # Training gives the sampled tokens the same log-probabilities as sampling did.
        drawn = served.sample(prompt, 1, types.SamplingParams(max_tokens=8, seed=4)).result(timeout=WAIT_S)
        tokens = [5, 6, 7, *drawn.sequences[0].tokens]
        trainer.load_state(f"tinker://{trainer.model_id}/weights/first").result(timeout=WAIT_S)
        scored = trainer.forward([self.datum(list(tokens))], "cross_entropy").result(timeout=WAIT_S)
        found = scored.loss_fn_outputs[0]["logprobs"].to_numpy()[2:]
        assert np.allclose(found, drawn.sequences[0].logprobs, atol=1e-3)
        crowd = [
            served.sample(
                types.ModelInput.from_ints([n, n + 1]), 2, types.SamplingParams(max_tokens=4, seed=n)
            )
            for n in range(1, 31)
        ]
        self.note("crowd", [[list(s.tokens) for s in f.result(timeout=WAIT_S).sequences] for f in crowd])

    def seeds(self, sampler: Any, prompt: Any) -> None:
        params = self.types.SamplingParams(max_tokens=12, seed=7, temperature=0.9, top_k=40, top_p=0.95)
        one, two = (self.wait(f"seed {n}", sampler.sample(prompt, 2, params)).sequences for n in range(2))
        assert [list(each.tokens) for each in one] == [list(each.tokens) for each in two]
        assert list(one[0].tokens) != list(one[1].tokens)
        unseeded = self.types.SamplingParams(max_tokens=12)
        free = [sampler.sample(prompt, 1, unseeded).result(timeout=WAIT_S).sequences[0] for _ in range(3)]
        assert len({tuple(each.tokens) for each in free}) > 1

    def stops(self, sampler: Any, prompt: Any) -> None:
        types = self.types
        free = types.SamplingParams(max_tokens=40, temperature=0.0, stop=[])
        long = self.wait("no stop", sampler.sample(prompt, 1, free)).sequences[0]
        assert (long.stop_reason, len(long.tokens)) == ("length", 40)
        token = int(long.tokens[5])
        first = list(long.tokens).index(token)
        params = types.SamplingParams(max_tokens=40, temperature=0.0, stop=[token])
        short = self.wait("stop token", sampler.sample(prompt, 1, params)).sequences[0]
        assert (short.stop_reason, list(short.tokens)) == ("stop", list(long.tokens)[: first + 1])
        for name, stop in {"text": "e", "texts": ["zq", "e"]}.items():
            params = types.SamplingParams(max_tokens=40, seed=1, stop=stop)
            self.wait(f"stop {name}", sampler.sample(prompt, 1, params))

    def told(self, sampler: Any) -> None:
        """Check the results about a prompt that all servers send, also older ones."""
        prompt = self.types.ModelInput.from_ints([11, 12, 13, 14])
        one = self.types.SamplingParams(max_tokens=1, seed=1)
        scores = self.note("scores", sampler.compute_logprobs(prompt).result(timeout=WAIT_S))
        assert scores[0] is None
        assert all(score < 0 for score in scores[1:])
        full = sampler.sample(prompt, 1, one, include_prompt_logprobs=True, topk_prompt_logprobs=3)
        full = self.wait("prompt", full)
        assert np.allclose(full.prompt_logprobs[1:], scores[1:], atol=1e-5)
        assert full.topk_prompt_logprobs[0] is None
        assert all(len(row) == 3 for row in full.topk_prompt_logprobs[1:])
        assert full.prompt_cache_hit_tokens >= 0

    def told_more(self, sampler: Any) -> None:
        """Check the results that only newer servers send."""
        types = self.types
        prompt = types.ModelInput.from_ints([11, 12, 13, 14])
        params = types.SamplingParams(max_tokens=3, seed=1)
        scores = sampler.compute_logprobs(prompt).result(timeout=WAIT_S)
        last = self.note("last", sampler.compute_logprobs(prompt, 2).result(timeout=WAIT_S))
        assert last[:2] == [None, None]
        assert np.allclose(last[2:], scores[2:], atol=1e-5)
        targets = types.TensorData(data=[12, 1, 13, -1, 14, 3], dtype="int64", shape=[3, 2])
        answer = sampler.sample(prompt, 2, params, True, 2, 2, targets, 2, 2)
        answer = self.wait("all of it", answer)
        wanted = answer.target_prompt_logprobs.to_numpy()
        assert wanted.shape == (3, 2)
        assert wanted[1, 1] == 0.0
        assert np.allclose(wanted[:, 0], scores[1:], atol=1e-5)
        assert answer.prompt_alt_tokens.tokens.to_numpy().shape == (3, 2)
        for sequence in answer.sequences:
            best = [row[0][1] for row in sequence.topk_logprobs]
            assert all(a >= b - 1e-5 for a, b in zip(best, sequence.logprobs, strict=True))

    def elsewhere(self, sampler: Any, prompt: Any, params: Any, wanted: Any) -> None:
        """Check that copies of a sampler, made by handle and by pickle, give the same sample."""
        os.environ["TINKER_API_KEY"] = self.key
        try:
            by_handle = self.tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle())
            by_pickle = pickle.loads(pickle.dumps(sampler))
            for name, copy in {"handle": by_handle, "pickle": by_pickle}.items():
                assert list(self.wait(name, copy.sample(prompt, 1, params)).sequences[0].tokens) == list(
                    wanted
                )
        finally:
            del os.environ["TINKER_API_KEY"]

    # ------------------------------------------------------------------------------------ refusals

    def refusals(self, client: Any, trainer: Any, sampler: Any) -> None:
        types = self.types
        prompt = types.ModelInput.from_ints([1, 2])
        params = types.SamplingParams(max_tokens=4)
        good = [self.datum([1, 2, 3])]
        self.refused("no such base", lambda: client.create_lora_training_client("no/such"), "no/such", 400)
        self.refused("no such loss", lambda: trainer.forward_backward(good, "wishful"), "wishful")
        self.refused(
            "no such setting",
            lambda: trainer.forward_backward(good, "cross_entropy", {"nonsense": 1.0}),
            "nonsense",
        )
        self.refused(
            "token out of range",
            lambda: trainer.forward([self.datum([1, 10**6])], "cross_entropy"),
            "data\\[0\\]",
        )
        self.refused(
            "negative rate", lambda: trainer.optim_step(types.AdamParams(learning_rate=-1.0)), "learning_rate"
        )
        self.refused("taken name", lambda: trainer.save_state("first"), "first")
        self.refused("short life", lambda: trainer.save_state("brief", ttl_seconds=10), "ttl_seconds")
        self.refused(
            "bad name", lambda: trainer.save_state("a..b" if not self.newer else "a b"), "a b|a\\.\\.b"
        )
        self.refused("no such weights", lambda: trainer.load_state("tinker://no/weights/where"), "where")
        long = types.SamplingParams(max_tokens=10**7)
        self.refused("too long", lambda: sampler.sample(prompt, 1, long), "max_tokens")
        strange = types.ModelInput.from_ints([10**6])
        self.refused("strange token", lambda: sampler.sample(strange, 1, params), "prompt")
        wrong = self.service(api_key="tml-wrong")
        self.to_close.append(wrong)
        self.refused("wrong key", wrong.get_server_capabilities, "key|Unauthorized", 401)
        # After these refusals the model still works.
        trainer.forward_backward(good, "cross_entropy").result(timeout=WAIT_S)
        if self.newer:
            self.refused(
                "other optimizer", lambda: trainer.optim_step(types.DimuonParams(learning_rate=0.1)), "dimuon"
            )
            secret = lambda: trainer.save_weights_external("e", age_encryption_recipients=["age1x"])  # noqa: E731
            self.refused("encryption", secret, "encrypt")
            pictures = types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png", expected_tokens=1)])
            self.refused("picture", lambda: sampler.sample(pictures, 1, params), "text only")

    # ------------------------------------------------------------------------------------ REST

    def rest(self, client: Any, trainer: Any, sampler: Any) -> None:
        rest = self.tinker.RestClient(base_url=self.url, api_key=self.key)
        self.to_close.append(rest)
        run, path = trainer.model_id, f"tinker://{trainer.model_id}"
        self.wait("run", rest.get_training_run(run))
        self.wait("run by path", rest.get_training_run_by_tinker_path(f"{path}/weights/first"))
        runs = self.wait("runs", rest.list_training_runs(limit=2, offset=1))
        assert len(runs.training_runs) == 2
        mine = self.wait("runs of a project", rest.list_training_runs(project_id="p-1"))
        assert run in [each.training_run_id for each in mine.training_runs]
        self.wait("weights info", rest.get_weights_info_by_tinker_path(f"{path}/weights/first"))
        self.wait("sampler", rest.get_sampler(f"{run.partition(':')[0]}:sample:0"))
        listed = self.wait("checkpoints", rest.list_checkpoints(run)).checkpoints
        assert {each.checkpoint_id for each in listed} >= {"weights/first", "sampler_weights/served"}
        page = self.wait("all checkpoints", rest.list_user_checkpoints(limit=2, offset=1))
        assert (len(page.checkpoints), page.cursor.offset) == (2, 1)
        self.changes(rest, path)
        self.download(rest, path)
        copied = self.wait("copy", rest.copy_weights(f"{path}/weights/first", "p-2", ttl_seconds=7200))
        restored = self.ready(client.create_training_client_from_state(copied))
        self.wait("of the copy", restored.forward([self.datum([5, 6, 7])], "cross_entropy"))
        self.sessions(rest, run)
        if self.exchange:
            self.wait("whoami", rest.whoami())
        self.refused("no run", lambda: rest.get_training_run("nobody"), "nobody", 404)
        self.refused("no checkpoint", lambda: rest.delete_checkpoint(run, "weights/none"), "none", 404)

    def changes(self, rest: Any, path: str) -> None:
        first = f"{path}/weights/second"
        self.wait("publish", rest.publish_checkpoint_from_tinker_path(first))
        if self.own:  # the reference client repeats a request after a 409 for five minutes
            self.refused(
                "public twice", lambda: rest.publish_checkpoint_from_tinker_path(first), "public", 409
            )
        self.wait("unpublish", rest.unpublish_checkpoint_from_tinker_path(first))
        if self.own:
            self.refused(
                "private twice", lambda: rest.unpublish_checkpoint_from_tinker_path(first), "private", 409
            )
        self.wait("ttl", rest.set_checkpoint_ttl_from_tinker_path(first, 4000))
        self.wait("no ttl", rest.set_checkpoint_ttl_from_tinker_path(first, None))
        self.refused("tiny ttl", lambda: rest.set_checkpoint_ttl_from_tinker_path(first, 1), "ttl", 400)
        self.wait("delete", rest.delete_checkpoint_from_tinker_path(first))
        self.refused("deleted", lambda: rest.delete_checkpoint_from_tinker_path(first), "second", 404)

    def download(self, rest: Any, path: str) -> None:
        external = rest.get_external_weights_urls(f"{path}/external_weights/export").result(timeout=WAIT_S)
        self.note("files", sorted(external.urls))
        moment = external.expires
        assert moment > dt.datetime.now(moment.tzinfo)
        whole, headers = _fetch(external.urls["adapter_model.safetensors"])
        assert headers["etag"].strip('"') == hashlib.sha256(whole).hexdigest()
        part, _ = _fetch(external.urls["adapter_model.safetensors"], Range="bytes=10-29")
        assert part == whole[10:30]
        config = json.loads(_fetch(external.urls["adapter_config.json"])[0])
        assert (config["r"], config["base_model_name_or_path"]) == (4, BASE)

    def sessions(self, rest: Any, run: str) -> None:
        session = run.partition(":")[0]
        found = self.wait("session", rest.get_session(session))
        assert run in found.training_run_ids
        assert session in self.wait("sessions", rest.list_sessions(limit=10)).sessions
        search = importlib.import_module(f"{self.tinker.__name__}.types")
        request = search.SessionSearchRequest(display_name="acceptance", user_metadata={"run": "1"}, limit=5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            hits = self.wait("search", rest.search_sessions(request))
        assert session in [each.session_id for each in hits.sessions]
        self.wait("project", rest.assign_session_project(session, "p-3"))
        trace = json.loads(_fetch(rest.export_session_trace(session).result(timeout=WAIT_S))[0])
        assert {"ForwardBackward", "OptimStep", "Sample"} <= {each["name"] for each in trace["traceEvents"]}

    def admin(self) -> None:
        admin = self.tinker.AdminClient(base_url=self.url, api_key=self.key)
        self.to_close.append(admin)
        now = dt.datetime.now(dt.timezone.utc)
        start = now.replace(minute=0, second=0, microsecond=0)
        usage = admin.get_billing_usage(start - HOUR, start + HOUR).result(timeout=WAIT_S)
        counts: dict[str, int] = {}
        for event in usage.data:
            info = event.event_info
            name = f"{info.type} {getattr(info, 'cached', '')}".strip()
            counts[name] = counts.get(name, 0) + getattr(info, "token_count", getattr(info, "count", 0))
        self.note("usage", counts)
        assert counts["training"] > 300, counts
        assert counts["sampling_sample"] > 200
        assert counts["sampling_prefill True"] > 0
        storage = self.note("storage", admin.get_current_checkpoint_storage_usage().result(timeout=WAIT_S))
        assert sum(item.checkpoint_count for item in storage.data) >= 4
        audit = admin.get_audit_log().result(timeout=WAIT_S)
        events = [entry.event for entry in audit.entries]
        assert {"checkpoint_created", "checkpoint_read", "checkpoint_deleted"} <= set(events)
        projects = self.note("projects", admin.get_audit_log("projects").result(timeout=WAIT_S))
        assert [entry.event for entry in projects.entries] == ["session_project_assigned"]
        self.refused(
            "long window", lambda: admin.get_billing_usage(start - 400 * HOUR, start), "14 days", 400
        )


def _fetch(url: str, **headers: str) -> tuple[bytes, dict[str, str]]:
    """Return the content and the headers of a file, requested without a key."""
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
        return reply.read(), {name.lower(): value for name, value in reply.headers.items()}


def _without_chance(tree: Any) -> Any:
    """Return a result with constants for the parts that differ from run to run: moments, ids of requests."""
    if isinstance(tree, dict):
        return {
            name: "some time" if name in _MOMENTS and each else _without_chance(each)
            for name, each in tree.items()
        }
    if isinstance(tree, list):
        return [_without_chance(each) for each in tree]
    return _COPY.sub(":copy:", _ID.sub("req-", tree)) if isinstance(tree, str) else tree


def main() -> None:
    package, url, key, *options = sys.argv[1:]
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    acceptance = Acceptance(
        package,
        url,
        key,
        newer="--json" not in options,
        torch="--torch" in options,
        exchange="--no-exchange" not in options,
    )
    print(json.dumps(acceptance.run()), flush=True)  # noqa: T201  # to the process that started this one
    # Exit without waiting for the threads of the reference client. No request is under way.
    os._exit(0)


if __name__ == "__main__":
    main()
