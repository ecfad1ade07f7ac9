"""The offline API: a model, prompts in, answers out, batched by the same engine that serves."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from .engine import Engine, EngineConfig
from .models import LoadedModel, Tokenizer, load
from .outputs import Completion, RequestOutput
from .sampling_params import SamplingParams

Prompt = str | list[int]
Message = Mapping[str, Any]


class LLM:
    """A model ready to answer. Threads may share one.

    Parameters
    ----------
    model : str or LoadedModel
        What ``models.load`` takes: a name, a folder or a .gguf file; or a loaded model.
    dtype : str
        Of the activations; see ``models.load``.
    **engine_config
        Fields of EngineConfig.

    Examples
    --------
    >>> with LLM("smollm2") as llm:  # doctest: +SKIP
    ...     print(llm.generate("The capital of France is", SamplingParams(max_tokens=8))[0].text)
    """

    def __init__(
        self, model: str | LoadedModel, *, dtype: str = "auto", progress: bool = False, **engine_config: Any
    ) -> None:
        self._loaded = load(model, dtype=dtype, progress=progress) if isinstance(model, str) else model
        # Prompts given at once wait here, not at the caller.
        self._engine = Engine(self._loaded, EngineConfig(**{"max_queue_depth": 1_000_000, **engine_config}))
        self._engine.start()
        self._ids = itertools.count()  # next() of it is atomic: threads may share an LLM

    @property
    def engine(self) -> Engine:
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer:
        return self._loaded.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete one prompt or several: texts, or lists of token ids.

        params is one for all or one each. Answers come in the order of the prompts. A request that fails
        has finish_reason "error" and the reason in ``error``; wrong arguments raise ValueError.
        """
        batch = _as_batch(prompts)
        each = self._params_each(params, len(batch))
        completions = []
        for prompt in batch:
            text = prompt if isinstance(prompt, str) else None
            ids = self._loaded.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
            completions.append(Completion(f"llm-{next(self._ids)}", text, ids))
        return self._run(completions, each)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_kwargs: Any,
    ) -> list[Completion]:
        """Answer one conversation or several through the model's chat template."""
        template = self._loaded.chat_template
        if template is None:
            raise ValueError(f"[chat] {self._loaded.name} has no chat template: use generate().")
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        texts = [
            template.render(list(m), add_generation_prompt=True, **template_kwargs) for m in conversations
        ]
        ids = [self._loaded.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        completions = self.generate(ids, params)
        for completion, text in zip(completions, texts, strict=True):
            completion.prompt = text
        return completions

    def close(self) -> None:
        """Stop the engine; requests under way are aborted."""
        self._engine.shutdown(drain=False)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _params_each(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None:
            params = SamplingParams()
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise ValueError(
                f"[generate] params must be one or one for each of {count} prompts; got {len(params)}."
            )
        return list(params)

    def _run(self, completions: list[Completion], params: list[SamplingParams]) -> list[Completion]:
        left = threading.Semaphore(0)
        submitted: list[Completion] = []
        try:
            for completion, each in zip(completions, params, strict=True):
                collect = _Collector(completion, left)
                self._engine.submit(completion.request_id, completion.prompt_token_ids, each, collect)
                submitted.append(completion)
            for _ in submitted:
                left.acquire()
        except BaseException:
            for completion in submitted:
                self._engine.cancel(completion.request_id)
            raise
        return completions


class _Collector:
    """Joins the deltas of a request."""

    def __init__(self, completion: Completion, finished: threading.Semaphore) -> None:
        self._completion, self._finished = completion, finished
        self._texts: list[str] = []

    def __call__(self, output: RequestOutput) -> None:
        completion = self._completion
        self._texts.append(output.text)
        completion.token_ids += output.token_ids
        if output.logprobs is not None:
            if completion.logprobs is None:
                completion.logprobs = []
            completion.logprobs += output.logprobs
        if output.prompt_logprobs is not None:
            completion.prompt_logprobs = list(output.prompt_logprobs)
        if output.finished:
            completion.text = "".join(self._texts)
            completion.finish_reason, completion.stop_reason = output.finish_reason, output.stop_reason
            completion.num_cached_tokens, completion.error = output.num_cached_tokens, output.error
            self._finished.release()


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    batch: list[Any] = list(prompts)
    return [batch] if batch and isinstance(batch[0], int) else batch
