"""The calls of a sampling client: samples, scores of prompts, and the description of the sampler."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from tinker_sync.clients import _deadlines
from tinker_sync.clients._arguments import check_sample
from tinker_sync.clients._async import async_blocking, async_result
from tinker_sync.clients._creation import ClientFuture
from tinker_sync.errors import TinkerError
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.naming import find_call_site, log_if_unread
from tinker_sync.runtime.sample_line import SampleLine
from tinker_sync.types.sampling import SampleRequest, SamplingParams

if TYPE_CHECKING:
    import os

    from tinker_sync.batch.item import BatchItem
    from tinker_sync.batch.samples import Prompt
    from tinker_sync.data.tokenizer import Tokenizer
    from tinker_sync.runtime.lazy import Lazy
    from tinker_sync.types import GetSamplerResponseInternal, ModelInput, SampleResponse, TensorData

Client = TypeVar("Client")


class SampleCalls(ClientFuture[Client]):
    """The part of a sampling client that samples, scores prompts, and describes the sampler."""

    _line: SampleLine
    _record_stability_info: bool
    _last: tuple[Any, SampleRequest | None]
    """The arguments of the last sample except its prompt, and its request; replaced as a whole."""
    _described: Lazy[GetSamplerResponseInternal]
    _base_model: str | None
    """The base model, from the arguments or from a handle; "" or None if it is not known."""

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
        *,
        deadline: float | None = None,
    ) -> APIFuture[SampleResponse]:
        """Sample continuations of a prompt.

        Args:
            prompt: the input of the model.
            num_samples: the number of continuations.
            sampling_params: length, temperature, stops and so on.
            include_prompt_logprobs: also score the prompt's tokens.
            topk_prompt_logprobs: also return so many of the likeliest tokens at each prompt position.
            topk_sample_logprobs: also return so many of the likeliest tokens at each sampled position.
            target_prompt_logprobs: token ids to score, a row for each prompt token after the first.
            prompt_alt_tokens_k: draw so many alternatives to each prompt token after the first.
            prompt_logprobs_last_n: score only the last so many prompt tokens.
            deadline: the seconds after which the call is given up.

        Raises:
            InvalidInputError: the request cannot be sent; nothing was sent.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     sampling = service.create_sampling_client(base_model="tinker-sync/tiny")
        ...     tokenizer = sampling.get_tokenizer()
        ...     prompt = tinker_sync.ModelInput.from_text("Q: 23+45=", tokenizer)
        ...     params = tinker_sync.SamplingParams(max_tokens=2, temperature=0.0)
        ...     sampled = sampling.sample(prompt, 1, params).result()
        >>> tokenizer.decode(sampled.sequences[0].tokens), len(sampled.sequences[0].logprobs)
        ('68', 2)
        """
        if not self._held.open:
            self._goes_ahead()
        check_sample(prompt, num_samples, sampling_params)
        asked = (
            self._line.sampling_session_id,
            num_samples,
            id(sampling_params),  # the kept request holds them, so that no others have their id
            include_prompt_logprobs,
            topk_prompt_logprobs,
            topk_sample_logprobs,
            id(target_prompt_logprobs),
            prompt_alt_tokens_k,
            prompt_logprobs_last_n,
        )
        kept, request = self._last
        if kept == asked and request is not None and type(prompt) is type(request.prompt):
            # Most samples differ from the last one by their prompt alone.
            request = request._with(prompt=prompt)
        else:
            request = SampleRequest(
                num_samples=num_samples,
                prompt=prompt,
                sampling_params=sampling_params,
                sampling_session_id=self._line.sampling_session_id,
                prompt_logprobs=include_prompt_logprobs,
                topk_prompt_logprobs=topk_prompt_logprobs,
                topk_sample_logprobs=topk_sample_logprobs,
                target_prompt_logprobs=target_prompt_logprobs,
                prompt_alt_tokens_k=prompt_alt_tokens_k,
                prompt_logprobs_last_n=prompt_logprobs_last_n,
                record_stability_info=self._record_stability_info,
            )
            unchanged = request.sampling_params is sampling_params
            if unchanged and request.target_prompt_logprobs is target_prompt_logprobs:
                self._last = asked, request
        return self._line.submit(request, self._until(deadline), may_forbid_retries=True)

    def map(
        self,
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams,
        num_samples: int = 1,
        *,
        max_in_flight: int = 256,
        ordered: bool = True,
        on_error: Literal["return", "raise"] = "return",
        save_to: str | os.PathLike[str] | None = None,
        progress: bool = True,
        total: int | None = None,
        tokenizer: Any = None,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        deadline: float | None = None,
    ) -> Generator[BatchItem, None, None]:
        """Sample continuations of many prompts, and yield a `BatchItem` for each.

        Nothing is sampled before the first item is taken: iterate over the result, or make a list of it. At
        most `max_in_flight` prompts are pulled ahead of the yielded items, so memory does not grow with the
        input. Leaving the loop, closing the generator and Ctrl-C cancel the samples under way.

        With `save_to` each response is written when it arrives, before its item is yielded. The same call in
        a new process yields the responses in the file with `saved=True`, and samples the rest. Failed prompts
        are not written, so a new run samples them again. The file does not record the model.

        Args:
            prompts: inputs of the model, rows of token ids, texts or chats; a list or a generator.
            sampling_params: length, temperature, stops and so on.
            num_samples: the number of continuations of each prompt.
            max_in_flight: the most prompts that are pulled ahead.
            ordered: yield in the order of the prompts; False yields responses as they arrive, so a slow
                one does not delay the others.
            on_error: "return" yields an item with the error of a failed prompt and goes on; "raise" raises
                the first error. An error that all later prompts would have too, such as that of a closed
                client, ends the batch and is raised after the items under way.
            save_to: a file for the responses, as JSON lines.
            progress: show a bar in a terminal or notebook if tqdm is installed; `TINKER_PROGRESS=0` hides it.
            total: the number of prompts of a generator, to estimate the time left.
            tokenizer: encodes texts and chats, and decodes the `texts` of items; None: the tokenizer of the
                model, which the first text or chat loads. Before that, items have no `texts`.
            include_prompt_logprobs: also score the tokens of the prompts.
            topk_prompt_logprobs: also return so many of the likeliest tokens at each prompt position.
            topk_sample_logprobs: also return so many of the likeliest tokens at each sampled position.
            deadline: the seconds after which one sample is given up.

        Raises:
            InvalidInputError: an argument is not valid; nothing was sent. The first item raises errors of the
                file `save_to`.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     sampling = service.create_sampling_client(base_model="tinker-sync/tiny")
        ...     params = tinker_sync.SamplingParams(max_tokens=3, temperature=0, stop=["\\n"])
        ...     for item in sampling.map(["Q: 23+45=", "Q: 71-38="], params):
        ...         print(item.index, item.texts)
        0 ['68\\n']
        1 ['33\\n']
        """
        from tinker_sync.batch.samples import Order, Window, map_samples

        options = {
            "include_prompt_logprobs": include_prompt_logprobs,
            "topk_prompt_logprobs": topk_prompt_logprobs,
            "topk_sample_logprobs": topk_sample_logprobs,
            "deadline": deadline,
        }
        order = Order(self, sampling_params, num_samples, options, tokenizer)
        window = Window(max_in_flight, ordered, on_error)
        return map_samples(prompts, order, window, save_to=save_to, progress=progress, total=total)

    def compute_logprobs(
        self,
        prompt: ModelInput,
        prompt_logprobs_last_n: int | None = None,
        *,
        deadline: float | None = None,
    ) -> APIFuture[list[float | None]]:
        """Compute the log-probability of each token of a prompt; None for the first token and unscored ones.

        Args:
            prompt: the tokens to score.
            prompt_logprobs_last_n: score only the last so many tokens.
            deadline: the seconds after which the call is given up.

        Raises:
            InvalidInputError: the prompt is not a `ModelInput`, or cannot be sent.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     sampling = service.create_sampling_client(base_model="tinker-sync/tiny")
        ...     prompt = tinker_sync.ModelInput.from_ints([1, 2, 3])
        ...     scores = sampling.compute_logprobs(prompt).result()
        ...     [score if score is None else score < 0 for score in scores]
        [None, True, True]
        """
        from tinker_sync.runtime.combine import CombinedFuture

        if not self._held.open:
            self._goes_ahead()
        check_sample(prompt)
        request = SampleRequest(
            num_samples=1,
            prompt=prompt,
            sampling_params=SamplingParams(max_tokens=1),
            sampling_session_id=self._line.sampling_session_id,
            prompt_logprobs=True,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
            record_stability_info=self._record_stability_info,
        )
        scored: APIFuture[list[float | None]] = CombinedFuture(
            [self._line.submit(request, self._until(deadline))],
            lambda responses: _prompt_logprobs(responses[0]),
            submit=self._runtime.pools.callback.run,
            soon=self._runtime.lifecycle.run_soon,
            clock=self._runtime.clock,
        )
        log_if_unread(scored, find_call_site())
        return scored

    def _until(self, deadline: float | None) -> float:
        return self._runtime.server.give_up_at(deadline, _deadlines.SAMPLE_S)

    # -------------------------------------------------------------------------------------- about it

    def get_base_model(self) -> str:
        """Return the name of the base model. Blocks until the server has answered, and keeps the answer.

        If the server does not describe samplers, return the name that the client was made with, or the name
        in the description of the training run.

        Raises:
            TinkerError: the server does not answer, or no name is known.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     sampling = service.create_sampling_client(base_model="tinker-sync/tiny")
        ...     sampling.get_base_model()
        'tinker-sync/tiny'
        """
        return self._about().base_model

    @overload
    def get_tokenizer(self, *, backend: Literal["tokenizers"] = "tokenizers") -> Tokenizer: ...
    @overload
    def get_tokenizer(self, *, backend: Literal["transformers"]) -> Any: ...
    def get_tokenizer(self, *, backend: Literal["tokenizers", "transformers"] = "tokenizers") -> Any:
        """Return the tokenizer of this model. Blocks.

        The server names the tokenizer. The process keeps the last 32 tokenizers in memory.

        Args:
            backend: "transformers" returns an object of that library, which must be installed.

        Raises:
            TokenizerError: the tokenizer cannot be loaded; the message names the files to provide.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     sampling = service.create_sampling_client(base_model="tinker-sync/tiny")
        ...     tokenizer = sampling.get_tokenizer()
        ...     tokenizer.decode(tokenizer.encode("Q: 23+45="))
        'Q: 23+45='
        """
        from tinker_sync.data.tokenizer import get_tokenizer

        about = self._about()
        return get_tokenizer(about.base_model, about.tokenizer_id, backend=backend)

    def _about(self) -> GetSamplerResponseInternal:
        from tinker_sync.clients._handles import describe_sampler

        sampler, line = self.sampling_session_id, self._line
        return self._described.get(
            lambda: describe_sampler(self._runtime, sampler, self._base_model, line.run_id)
        )

    @property
    def sampling_session_id(self) -> str:
        """The id of this sampler at the server. Waits until the sampler exists.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     sampling = service.create_sampling_client(base_model="tinker-sync/tiny")
        ...     sampling.sampling_session_id.endswith(":sample:0")
        True
        """
        self.result()
        return self._line.sampling_session_id

    def _name(self) -> str:
        return self._line.sampling_session_id

    sample_async = async_result(sample)
    compute_logprobs_async = async_result(compute_logprobs)
    get_base_model_async = async_blocking(get_base_model)
    get_tokenizer_async = async_blocking(get_tokenizer)


def _prompt_logprobs(response: SampleResponse) -> list[float | None]:
    scored = response.prompt_logprobs
    if scored is None:
        raise TinkerError("the server scored no prompt tokens, though it was asked to")
    return scored
