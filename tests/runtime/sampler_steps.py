"""Short ways to a sampler's step."""

import numpy as np

from runtime.executors.base import Choose, StepOutput
from runtime.request import Request, SamplingParams
from runtime.sampler import Sampler

CHOOSE: Choose | None = None  # replaced by conftest.py


def step(logits):
    logits = np.array(logits, np.float32)
    if CHOOSE is not None:
        return StepOutput(logits, logits.argmax(axis=1), CHOOSE)  # finds a NaN, as OpenVINOExecutor does
    return StepOutput(logits, np.nan_to_num(logits).argmax(axis=1))


def make_request(prompt=(0,), output=(), **params):
    params.setdefault("max_tokens", 1000)
    request = Request("r", list(prompt), SamplingParams(**params))
    request.token_ids.extend(output)
    return request


def pick(logits, prompt=(0,), output=(), eos=(), **params):
    """The token one request gets from one row of logits."""
    sampled = Sampler(len(logits), eos).sample(step([logits]), [make_request(prompt, output, **params)])
    assert not sampled.errors
    return int(sampled.token_ids[0])


def softmax(values):
    weights = np.exp(np.asarray(values, np.float64) - np.max(values))
    return weights / weights.sum()
