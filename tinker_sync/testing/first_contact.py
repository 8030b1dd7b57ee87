"""`check`: one pass through the life of a small model at a server, with what was expected and what was seen.

`insight.examine` looks at the way to the server and changes nothing. `check` begins with it, and goes on: it
creates a model, trains a step, saves, samples, resumes, downloads and deletes, with public methods only. All
requests pass through `record`, so that a report can hold them. What a step needs and an earlier one did not
get is skipped. At the end, whatever happened, the checkpoints are deleted and the session is ended; should
this process die before, the checkpoints expire after an hour.

One thread makes a check.
"""

from __future__ import annotations

import math
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attrs import frozen

from tinker_sync._base.secret import mask_text
from tinker_sync.data import from_sample
from tinker_sync.errors import (
    ConfigurationError,
    EarlierCallFailedError,
    InvalidInputError,
    TinkerError,
    UnsupportedByServerError,
)
from tinker_sync.insight import PriceTable, State, TokenCounts, examine
from tinker_sync.loop import verify_checkpoint
from tinker_sync.losses import divergence
from tinker_sync.testing.tapes import RecordingProxy, record
from tinker_sync.types import AdamParams, Datum, ForwardBackwardOutput, ModelInput, SamplingParams

if TYPE_CHECKING:
    from tinker_sync.clients.rest import RestClient
    from tinker_sync.clients.service import ServiceClient
    from tinker_sync.clients.training import TrainingClient
    from tinker_sync.insight.recording import Recording
    from tinker_sync.testing.cassette import RecordedExchange

# Token ids that every vocabulary has.
_EXAMPLES: Final = ([11, 23, 35, 47, 59, 71, 83, 95, 107], [12, 24, 36, 48, 60, 72, 84, 96, 108])
_PROMPT: Final = _EXAMPLES[0][:4]
_SAMPLED: Final = 8
# What the steps use: five passes over the examples, one over the sample, and the sample.
PLANNED: Final = TokenCounts(trained=5 * 16 + 11, prompt=4, sampled=_SAMPLED)
# No call that would use more is sent. A pass that is sent again after an unclear end may be billed twice.
_MOST_TOKENS: Final = 2 * PLANNED.total
_RATE: Final = 1e-3
_RANK: Final = 8
_TTL_S: Final = 3600
_SAME: Final = 1e-2
"""The relative difference of two computations of one loss, such as in bfloat16 on other machines."""
_WIDE_KL: Final = 0.05
_STEP_S: Final = 120.0
_NOWHERE: Final = "check-for-deletion"
"""The name of a checkpoint that does not exist."""
_SIZE: Final = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)\s*([bm])(?![a-z])", re.IGNORECASE)


@frozen
class CheckRow:
    """A row of a `CheckReport`.

    >>> CheckRow("step", "another loss", "the loss stays at 3.2", "failure").state
    'failure'
    """

    name: str
    expected: str
    seen: str
    state: State
    """"ok"; "warning": it works, with what `seen` names; "failure"; or "skipped"."""
    advice: str = ""


@frozen(kw_only=True)
class CheckReport:
    """The result of `check`.

    Attributes:
        base_url: the server.
        model: the base model; None if none was chosen.
        rows: the rows, in the order of the steps.
        tokens: the tokens that were used.
        cassette: the file with the requests and answers; None if there is none.
    """

    base_url: str
    model: str | None
    rows: tuple[CheckRow, ...]
    tokens: TokenCounts
    cassette: Path | None = None

    @property
    def failed(self) -> list[str]:
        """The names of the rows that failed."""
        return [row.name for row in self.rows if row.state == "failure"]


def check(
    base_url: str | None = None,
    *,
    spend: float = 0.05,
    ask: Callable[[str], bool] | None = None,
    model: str | None = None,
    deadline: float = _STEP_S,
    to: str | Path | None = None,
    leave: bool = False,
) -> CheckReport | None:
    """Try everything once at a server, within a budget, and clean up. Blocks; takes about a minute.

    Args:
        base_url: the server; "local" is the embedded one; None: `TINKER_BASE_URL`, else the hosted service.
        spend: the most dollars.
        ask: called with a question before anything is created at the hosted service, which bills; other
            servers are not asked about. None: the hosted service is refused.
        model: the base model; None: the cheapest one by the user's prices, else the smallest by its name.
        deadline: the most seconds for each call.
        to: the file for all requests and answers, in which keys are masked; None: none.
        leave: save also at a server that cannot delete checkpoints. Otherwise the check saves nothing there,
            and samples from the base model.

    Returns:
        The report, or None if `ask` returned False.

    Raises:
        InvalidInputError: `spend` or `deadline` is not a positive number.
        ConfigurationError: the hosted service is to be checked without `ask`.

    >>> report = check("local")
    >>> report.failed, [row.name for row in report.rows][-3:]
    ([], ['delete', 'end', 'left behind'])
    """
    for name, value in (("spend", spend), ("deadline", deadline)):
        given: object = value
        if not isinstance(given, (int, float)) or not 0 < given < math.inf:
            raise InvalidInputError(f"check: {name}: expected a positive number, got {value!r}")
    with tempfile.TemporaryDirectory(prefix="tinker-sync-check-") as directory:
        place = Path(directory)
        tape = place / "check.cassette"
        proxy = record(tape, base_url=base_url, replayable=False)
        if proxy.is_hosted and ask is None:
            raise ConfigurationError("check: the hosted service bills what is used; give ask=")
        found = examine(base_url)
        rows = [CheckRow(each.name, "", each.what, each.state, each.advice) for each in found]
        visit = _Visit(proxy, rows, place, spend=spend, ask=ask, model=model, deadline=deadline, leave=leave)
        if not any(row.state == "failure" for row in rows):
            with proxy:
                visit.run()
        if visit.refused:
            return None
        cassette = None
        if to is not None and tape.exists():
            cassette = Path(to)
            cassette.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(tape, cassette)
        return CheckReport(
            base_url=proxy.upstream,
            model=visit.model,
            rows=tuple(rows),
            tokens=visit.tokens,
            cassette=cassette,
        )


class _Differs(Exception):  # it carries a finding of a step to its row
    def __init__(self, seen: str, advice: str = "", *, state: State = "failure") -> None:
        super().__init__(seen)
        self.row_state, self.advice = state, advice


class _Unmet(Exception):
    """What a step needs has not been made."""


@frozen
class _Step:
    name: str
    expected: str
    take: Callable[[], str]
    since: Callable[[], _Mark] | None = None
    """From where on the troubles on the wire belong to this step; None: from its beginning."""
    at: str | None = None
    """The only call whose troubles belong to this step; None: all calls."""


@frozen
class _Mark:
    """A moment of the check: the numbers of exchanges, lost requests and reported pauses before it."""

    exchanges: int
    lost: int
    pauses: int


class _Visit:
    """One check: what the steps have made so far, and their rows."""

    def __init__(
        self,
        proxy: RecordingProxy,
        rows: list[CheckRow],
        place: Path,
        *,
        spend: float,
        ask: Callable[[str], bool] | None,
        model: str | None,
        deadline: float,
        leave: bool,
    ) -> None:
        self._proxy, self._rows, self._place = proxy, rows, place
        self._spend, self._ask, self._deadline, self._leave = spend, ask, deadline, leave
        self.model, self.refused = model, False
        self.tokens = TokenCounts()
        self._runs: list[str] = []
        self._paths: list[str] = []
        self._models: list[TrainingClient] = []
        self._loss: float | None = None
        self._before: ForwardBackwardOutput | None = None
        self._saved: str | None = None
        self._leave_nothing = False

    # ---------------------------------------------------------------------------------- the order

    def run(self) -> None:
        with self._client() as service, service.explain() as recording, ExitStack() as limits:
            self._take(recording, _Step("models", "at least one model", lambda: self._choose(service)))
            if self.model is None or not self._may_spend():
                return
            limits.enter_context(service.budget(tokens=_MOST_TOKENS))
            try:
                for step in self._steps(service, recording):
                    self._take(recording, step)
            finally:
                self.tokens = service.usage(prices=PriceTable()).tokens
                self._clean_up(service, recording)

    def _steps(self, service: ServiceClient, recording: Recording) -> Iterator[_Step]:
        rest = service.create_rest_client()
        yield from self._creation(service, recording)
        yield _Step("pass", "a finite loss, the sum of the log-probabilities", self._pass)
        yield _Step("step", "the loss of the same data falls", self._step)
        yield _Step("save", "a path, which the list has too", lambda: self._save(rest))
        likely = f"1 to {_SAMPLED} tokens, as likely as the trainer says"
        yield _Step("sample", likely, lambda: self._sample(service))
        same = "weights and optimizer as before the save"
        yield _Step("resume", same, lambda: self._resume(service))
        yield _Step("download", "an adapter and its configuration", lambda: self._download(rest))

    @contextmanager
    def _client(self) -> Iterator[ServiceClient]:
        # Through the proxy, the hosted service has the address of this machine, so its protocol is named.
        dialect = "proto" if self._proxy.is_hosted else "auto"
        with self._proxy.service(dialect=dialect, deadline=self._deadline) as service:
            yield service

    def _take(self, recording: Recording, step: _Step) -> None:
        """Take a step, and add its row: what was seen, with the troubles that the client overcame."""
        mark = self._mark(recording) if step.since is None else step.since()
        state: State = "ok"
        advice = ""
        try:
            seen = step.take()
        except _Unmet as unmet:
            self._rows.append(CheckRow(step.name, step.expected, f"needs {unmet}", "skipped"))
            return
        except _Differs as differs:
            seen, state, advice = str(differs), differs.row_state, differs.advice
        except (UnsupportedByServerError, EarlierCallFailedError) as error:
            seen, state = _first_line(error).partition(" (sequence number")[0], "skipped"
        except TinkerError as error:
            seen, state = f"{type(error).__name__}: {_first_line(error)}", "failure"
            advice = "send this table with the file of --report to the maintainers of the server"
        except Exception as error:  # noqa: BLE001  # a defect of this package or of the disk is a finding too
            seen, state = f"{type(error).__name__}: {_first_line(error)}", "failure"
        troubles = self._find_troubles(recording, mark, step.at)
        if troubles:
            seen += f"; on the way: {troubles}"
            state = "warning" if state == "ok" else state
        self._rows.append(CheckRow(step.name, step.expected, mask_text(seen), state, advice))

    def _mark(self, recording: Recording) -> _Mark:
        return _Mark(len(self._proxy.cassette.exchanges), len(self._proxy.lost), len(recording.pauses))

    def _find_troubles(self, recording: Recording, mark: _Mark, at: str | None) -> str:
        """Return what has gone wrong on the wire since a mark, such as "503 at forward_backward"."""
        troubles = [
            (exchange.target, str(exchange.reply.status))
            for exchange in self._proxy.cassette.exchanges[mark.exchanges :]
            if _is_trouble(exchange)
        ]
        troubles += [(target, f"no answer ({why})") for _, target, why in self._proxy.lost[mark.lost :]]
        found = Counter(
            f"{what} at {call}" for target, what in troubles if at in (None, call := _name_call(target))
        )
        for pause in recording.pauses[mark.pauses :]:
            if pause.delay_s == 0 and at is None:
                found[f"a pause of {pause.path} that the server reported: {pause.reason or 'no reason'}"] += 1
        return ", ".join(f"{text}{f' ({count} times)' if count > 1 else ''}" for text, count in found.items())

    # ---------------------------------------------------------------------------------- before money

    def _choose(self, service: ServiceClient) -> str:
        models = service.get_server_capabilities().supported_models
        offered = [each.model_name for each in models if each.model_name and each.trainable is not False]
        if not offered and self.model is not None:
            return f"none is listed; {self.model} is used"
        if not offered:
            raise _Differs("the server lists no model", "ask who runs it, or name one with --model")
        if self.model is None:
            self.model = min(offered, key=_rank_by_cost(PriceTable.load()))
        elif self.model not in offered:
            wanted, self.model = self.model, None
            raise _Differs(f"{wanted} is not among {', '.join(offered[:8])}", "name one of them")
        return f"{len(offered)}; {self.model} is used"

    def _may_spend(self) -> bool:
        cost_usd = PriceTable.load().price(self.model).of(PLANNED + PLANNED)
        expected = f"at most ${self._spend:.2f}"
        if not self._proxy.is_hosted:
            self._rows.append(CheckRow("budget", expected, "this server does not bill", "ok"))
            return True
        if cost_usd is None:
            bound = self._spend / _MOST_TOKENS * 1e6
            shown = (
                f"at most {_MOST_TOKENS} tokens, whose price is not known here; they cost less than "
                f"${self._spend:.2f} up to a price of ${bound:,.0f} a million"
            )
        else:
            shown = f"at most {_MOST_TOKENS} tokens, which cost ${cost_usd:.4f}"
        if cost_usd is not None and cost_usd > self._spend:
            advice = f"give --spend {cost_usd:.2f}, or another --model"
            self._rows.append(CheckRow("budget", expected, shown, "failure", advice))
            return False
        question = (
            f"Train {self.model} at {self._proxy.upstream} for one step, sample {_SAMPLED} tokens, "
            f"and delete it all again: {shown}. Go ahead?"
        )
        if self._ask is None or not self._ask(question):
            self.refused = True
            return False
        self._rows.append(CheckRow("budget", expected, shown, "ok"))
        return True

    # ---------------------------------------------------------------------------------- the steps

    def _creation(self, service: ServiceClient, recording: Recording) -> Iterator[_Step]:
        """Yield a step for the session and one for the model: one call makes both."""
        made: list[TrainingClient] = []
        failures: list[Exception] = []

        def session() -> str:
            client = service.create_lora_training_client(self.model or "", rank=_RANK, seed=1)
            try:
                made.append(client.result())
            except Exception as error:  # noqa: BLE001  # it belongs to the row of the model, if there is a session
                failures.append(error)
            session_id = service.usage(prices=PriceTable()).session_id
            if session_id is None:
                raise failures.pop() if failures else _Differs("the server gave no session")
            return session_id

        def model() -> str:
            if failures:
                raise failures[0]
            if not made:
                raise _Unmet("the session")
            client = made[0]
            self._keep(client)
            info = client.get_info()
            rank = f", rank {info.lora_rank}" if info.lora_rank is not None else ""
            if info.lora_rank not in (None, _RANK):
                raise _Differs(f"{client.model_id}{rank}, where {_RANK} was asked for", state="warning")
            return f"{client.model_id}{rank}"

        begun = self._mark(recording)
        yield _Step("session", "an id", session, at="create_session")
        yield _Step("model", f"a model with rank {_RANK}", model, since=lambda: begun)

    def _keep(self, client: TrainingClient) -> None:
        self._models.append(client)
        self._runs.append(client.model_id)

    def _training(self) -> TrainingClient:
        if not self._models:
            raise _Unmet("the model")
        return self._models[0]

    def _pass(self) -> str:
        passed = self._training().forward_backward(_make_data(), "cross_entropy").result()
        loss = _loss_of(passed)
        told = passed.metrics.get("loss:sum")
        self._loss = loss
        if told is not None and not _agree(told, loss):
            raise _Differs(
                f"loss:sum is {told:.6g}, but the log-probabilities add up to {loss:.6g}", state="warning"
            )
        return f"loss {loss:.4f}"

    def _step(self) -> str:
        training = self._training()
        if self._loss is None:
            raise _Unmet("the pass")
        before = self._loss
        training.optim_step(AdamParams(learning_rate=_RATE)).result()
        self._loss = None
        self._before = training.forward(_make_data(), "cross_entropy").result()
        self._loss = _loss_of(self._before)
        seen = f"from {before:.4f} to {self._loss:.4f}"
        if self._loss == before:
            raise _Differs(f"the loss stays at {before:.6g}", "the server has not applied the gradients")
        if self._loss > before:
            raise _Differs(seen, "the gradients may be wrong, or those of other data", state="warning")
        return seen

    def _may_save(self, rest: RestClient, run: str) -> None:
        """Raise UnsupportedByServerError if the server cannot delete what it saves.

        The call to delete a checkpoint that does not exist shows whether the server has the call.
        """
        try:
            rest.delete_checkpoint_from_tinker_path(f"tinker://{run}/weights/{_NOWHERE}").result()
        except UnsupportedByServerError:
            self._leave_nothing = not self._leave
        except TinkerError:
            return
        self._refuse_to_leave()

    def _refuse_to_leave(self) -> None:
        if self._leave_nothing:
            raise UnsupportedByServerError(
                "this server cannot delete checkpoints, so none is saved; --leave saves all the same",
                feature="delete_checkpoint",
            )

    def _save(self, rest: RestClient) -> str:
        training = self._training()
        self._may_save(rest, training.model_id)
        path = training.save_state("check", ttl_seconds=_TTL_S).result().path
        self._paths.append(path)
        self._saved = path
        try:
            listed = rest.list_checkpoints(training.model_id).result().checkpoints
        except UnsupportedByServerError:
            return path
        except TinkerError as error:
            raise _Differs(f"{path}, but no list: {_first_line(error)}", state="warning") from error
        found = [each for each in listed if each.tinker_path == path]
        if not found:
            raise _Differs(f"{path}, but the run's list has {len(listed)} others", state="warning")
        if found[0].expires_at is None:
            raise _Differs(f"{path}, which never expires", "ttl_seconds has no effect", state="warning")
        return path

    def _sample(self, service: ServiceClient) -> str:
        training = self._training()
        if self._leave_nothing:
            sampler = service.create_sampling_client(base_model=self.model)
        else:
            sampler = training.save_weights_and_get_sampling_client()
        params = SamplingParams(max_tokens=_SAMPLED, temperature=1.0, seed=7)
        prompt = ModelInput.from_ints(_PROMPT)
        sequence = sampler.sample(prompt, 1, params).result().sequences[0]
        count = len(sequence.tokens)
        if not 1 <= count <= _SAMPLED:
            raise _Differs(f"{count} tokens")
        if sequence.logprobs is None:
            raise _Differs(f"{count} tokens without log-probabilities", state="warning")
        if self._leave_nothing:
            return f"{count} tokens of the base model"
        datum = from_sample(prompt, sequence, 1.0, provenance=False)
        plain = Datum(datum.model_input, {"target_tokens": datum.loss_fn_inputs["target_tokens"]})
        passed = training.forward([_weighted(plain)], "cross_entropy").result()
        kl = divergence([datum], passed).tokens.kl_sampler_trainer_k3
        seen = f"{count} tokens, KL(sampler, trainer) {kl:.2g}"
        if not kl <= _WIDE_KL:
            raise _Differs(seen, "the sampler does not have the weights that are trained", state="warning")
        return seen

    def _resume(self, service: ServiceClient) -> str:
        if self._saved is None or self._before is None:
            raise _Unmet("the save" if self._saved is None else "the step")
        step = AdamParams(learning_rate=_RATE)
        verify_checkpoint(service, self._saved, _make_data(), self._before, step=step, tolerance=_SAME)
        return "the same loss, and the optimizer goes on"

    def _download(self, rest: RestClient) -> str:
        self._refuse_to_leave()
        path = self._training().save_weights_for_sampler("check-sampler", ttl_seconds=_TTL_S).result().path
        self._paths.append(path)
        got = rest.download_checkpoint(path, to=self._place / "adapter").result()
        sizes = {Path(file.name).name: file.size_bytes for file in got.files}
        seen = ", ".join(f"{name} ({size:,} bytes)" for name, size in sorted(sizes.items()))
        if got.interruptions:
            seen += f"; {got.interruptions} interruptions"
        lacking = [
            name for name in ("adapter_config.json", "adapter_model.safetensors") if not sizes.get(name)
        ]
        if lacking:
            raise _Differs(f"{seen or 'no file'}; {' and '.join(lacking)} missing", state="warning")
        return seen

    # ---------------------------------------------------------------------------------- the end

    def _clean_up(self, service: ServiceClient, recording: Recording) -> None:
        def unload_and_close() -> str:
            failures, unloaded = [], 0
            for model in self._models:
                try:
                    model.unload().result()
                    unloaded += 1
                except UnsupportedByServerError:
                    pass  # the end of the session unloads them
                except TinkerError as error:
                    failures.append(f"{model.model_id}: {_first_line(error)}")
            mark = len(self._proxy.cassette.exchanges)
            service.close().result()
            closing = self._proxy.cassette.exchanges[mark:]
            told = [each.reply.status for each in closing if each.target.endswith("/finish")]
            if told and told[-1] >= 400:
                failures.append(f"the end of the session was answered with {told[-1]}")
            if failures:
                advice = "models without calls and sessions without heartbeats end by themselves"
                raise _Differs("; ".join(failures), advice, state="warning")
            return f"{unloaded} of {len(self._models)} models unloaded, session ended"

        # A client of its own: that of the steps may have lost its session.
        with self._client() as cleaner, cleaner.explain() as cleaning:
            rest = cleaner.create_rest_client()
            self._take(cleaning, _Step("delete", "what was saved is gone", lambda: self._delete(rest)))
            self._take(recording, _Step("end", "models and session end", unload_and_close))
            self._take(cleaning, _Step("left behind", "nothing", lambda: self._look_back(rest)))

    def _find_saved(self, rest: RestClient) -> list[str]:
        """Return the checkpoints of the runs; the paths that are known, if the server has no lists."""
        found = set(self._paths)
        for run in self._runs:
            # Also those of saves whose answer was lost.
            with suppress(TinkerError):
                found.update(each.tinker_path for each in rest.list_checkpoints(run).result().checkpoints)
        return sorted(found)

    def _delete(self, rest: RestClient) -> str:
        paths = self._find_saved(rest)
        if not paths:
            raise _Unmet("a save")
        outcomes = rest.delete_checkpoints(paths).result()
        failed = [each for each in outcomes if not each.ok and not _delete_by_name(rest, each.tinker_path)]
        self._paths = [each.tinker_path for each in failed]
        if not failed:
            return f"{len(paths)} deleted"
        if all(isinstance(each.error, UnsupportedByServerError) for each in failed):
            raise UnsupportedByServerError(_first_line(failed[0].error), feature="delete_checkpoint")
        named = "; ".join(f"{each.tinker_path}: {_first_line(each.error)}" for each in failed)
        raise _Differs(named, "tinker-sync checkpoint delete PATH")

    def _look_back(self, rest: RestClient) -> str:
        left = self._find_saved(rest)
        if left:
            advice = f"tinker-sync checkpoint delete {' '.join(left)}"
            raise _Differs(", ".join(left), advice, state="warning")
        return "nothing"


# ------------------------------------------------------------------------------------------------ helpers


def _make_data() -> list[Datum]:
    return [
        _weighted(Datum(ModelInput.from_ints(each[:-1]), {"target_tokens": each[1:]})) for each in _EXAMPLES
    ]


def _weighted(datum: Datum) -> Datum:
    """Return the datum with weights of 1, which some servers require."""
    targets = datum.loss_fn_inputs["target_tokens"]
    return Datum(datum.model_input, {"target_tokens": targets, "weights": [1.0] * len(targets.data)})


def _loss_of(passed: ForwardBackwardOutput) -> float:
    if len(passed.loss_fn_outputs) < 1 or any("logprobs" not in each for each in passed.loss_fn_outputs):
        raise _Differs("the outputs have no logprobs")
    loss = -math.fsum(value for each in passed.loss_fn_outputs for value in each["logprobs"].data)
    if not math.isfinite(loss) or loss < 0:
        raise _Differs(f"the loss is {loss}")
    return loss


def _agree(one: float, other: float) -> bool:
    return abs(one - other) <= _SAME * max(abs(one), abs(other))


def _rank_by_cost(prices: PriceTable) -> Callable[[str], tuple[float, float]]:
    """Return a sort key: models of known price first, by price, then the others by the size in their name."""

    def rank(name: str) -> tuple[float, float]:
        cost_usd = prices.price(name).of(PLANNED)
        sizes = [float(number) * (1e9 if unit in "bB" else 1e6) for number, unit in _SIZE.findall(name)]
        return (math.inf if cost_usd is None else cost_usd), min(sizes, default=math.inf)

    return rank


# Normal answers: a long poll that ends without a result, and a call that a server does not have.
_NORMAL: Final = frozenset({400, 404, 405, 408, 409, 422})


def _is_trouble(exchange: RecordedExchange) -> bool:
    status = exchange.reply.status
    # A 400 without a text comes from a proxy, and the client tries again.
    normal = status in _NORMAL and not (status == 400 and not exchange.reply.content)
    return status >= 400 and not normal and not exchange.target.endswith(_NOWHERE)


def _delete_by_name(rest: RestClient, path: str) -> bool:
    """Delete a checkpoint at a server whose checkpoints have no folder. Return False if that is refused."""
    run, _, rest_of_path = path.removeprefix("tinker://").partition("/")
    try:
        rest.delete_checkpoint(run, rest_of_path.rpartition("/")[2]).result()
    except TinkerError:
        return False
    return True


def _name_call(target: str) -> str:
    """Return the last word of an address, such as "forward_backward"."""
    return target.partition("?")[0].rpartition("/")[2]


def _first_line(error: BaseException | None) -> str:
    lines: Sequence[str] = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
