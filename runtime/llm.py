"""The Python API without a server: `LLM(engine).generate(prompts)`, `.stream(prompt)`, `.chat(messages)`."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.config import from_options
from runtime.engine import Engine, Output
from runtime.errors import ForgelineError, InvalidRequest
from runtime.request import FinishReason, SamplingParams, Timings
from runtime.sampler import TokenLogprobs


@dataclass(frozen=True)
class Completion:
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    cum_logprob: float
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    timings: Timings


class LLM:
    """One engine in this process.

    >>> with LLM("engines/smollm2") as llm:                                             # doctest: +SKIP
    ...     print(llm.generate("The capital of France is", SamplingParams(max_tokens=8))[0].text)
    """

    def __init__(self, engine: str | os.PathLike[str], **options: Any) -> None:
        """`options` are the fields of RuntimeConfig."""
        if not isinstance(engine, (str, os.PathLike)):
            raise InvalidRequest(f"engine is {engine!r} but must be the directory that `builder build` wrote")
        self._adopt(Engine.load(engine, from_options(options)))

    def _adopt(self, engine: Engine) -> None:
        self.engine = engine
        self.tokenizer = engine.tokenizer

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """Wrap an engine that is already loaded; `close` closes it."""
        llm = cls.__new__(cls)
        llm._adopt(engine)
        return llm

    def encode(self, prompt: str, *, chat: bool = False) -> list[int]:
        """Token ids of a prompt, or of a user message in the chat template.

        Raises  InvalidRequest; PromptTooLong, before tokenizing, for text that cannot fit.
        """
        return self._encode_chat([{"role": "user", "content": prompt}]) if chat else self.engine.encode(prompt)

    def _encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        if not isinstance(messages, Iterable):
            raise InvalidRequest(f"messages is {messages!r} but must be a list of objects with a role and content")
        text = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)
        return self.engine.encode(text, add_special_tokens=False)

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete every prompt (text or token ids) in one in-flight batch; results in the order of `prompts`.

        Raises  InvalidRequest, PromptTooLong; ForgelineError when the engine fails a request.
        """
        if not isinstance(prompts, Iterable):
            raise InvalidRequest(f"prompts is {prompts!r} but must be a prompt or a list of prompts")
        batch: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
        each = [params or SamplingParams()] * len(batch) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(batch):
            raise ForgelineError(f"{len(each)} SamplingParams for {len(batch)} prompts; give one, or one per prompt")
        outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
        ids: list[str] = []
        try:
            for prompt, own in zip(batch, each, strict=True):
                ids.append(self.engine.submit(prompt, own, on_output=outputs.put))
        except ForgelineError:
            for request_id in ids:
                self.engine.cancel(request_id)
            raise
        collected: dict[str, list[Output]] = {request_id: [] for request_id in ids}
        missing = set(ids)
        while missing:
            output = outputs.get()
            collected[output.request_id].append(output)
            if output.finish_reason is not None:
                missing.discard(output.request_id)
        return [_join(collected[request_id]) for request_id in ids]

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[Output]:
        """Yield deltas as they are produced. Leaving the loop early cancels the request."""
        outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
        request_id = self.engine.submit(prompt, params or SamplingParams(), on_output=outputs.put)
        try:
            while True:
                output = outputs.get()
                if output.finish_reason is FinishReason.ERROR:
                    raise ForgelineError(output.error)
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self.engine.cancel(request_id)

    def chat(self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None) -> Completion:
        """Apply the chat template and complete the assistant's turn."""
        return self.generate([self._encode_chat(messages)], params)[0]

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _join(outputs: list[Output]) -> Completion:
    last = outputs[-1]
    if last.finish_reason is FinishReason.ERROR or last.finish_reason is None:
        raise ForgelineError(last.error)
    return Completion(
        text="".join(output.text for output in outputs),
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        logprobs=tuple(entry for output in outputs for entry in output.logprobs),
        cum_logprob=last.cum_logprob,
        finish_reason=last.finish_reason,
        num_prompt_tokens=last.num_prompt_tokens,
        num_cached_tokens=last.num_cached_tokens,
        timings=last.timings,
    )
