"""The model that Triton's Python backend loads: one engine, requests in, streams out.

Threads   execute (Triton's): decodes, validates, submits; never waits for the engine
          forgeline-output (the engine's): builds and sends responses; `send` costs 50–100 µs, 20 µs of it this process's CPU
          forgeline-watch: asks Triton which clients have gone, a few at a time, ends what is past its timeout
          forgeline-metrics: brings the gauges up to date
          forgeline-control: does what the supervisor says when it stops (control.py)
Cancel    a closed stream, gRPC cancel or HTTP disconnect is seen within `cancellation_check_period_ms` for every
          MAX_ASKED requests in flight; a request with `stop` true cancels the one of the same id
Stop      `drain`: new requests are refused, running ones may finish for a while, what is left then ends with an error
Death     when the engine's loop dies the live requests get an error and the process ends, so that the supervisor restarts it.
          When the server is gone a shell beside this process ends it, for a thread may be unable to (orphan.py)
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from runtime.contract import load_manifest
from runtime.engine import Engine
from runtime.errors import ForgelineError, InvalidRequest, QueueFull, UnsupportedFeature
from runtime.metrics import EngineMetrics, TritonRegistry
from runtime.serving.chunks import Chunks
from runtime.serving.control import ControlServer, own_control_path
from runtime.serving.options import ENGINE_DIR, parse_options, runtime_config
from runtime.serving.orphan import OrphanWatcher
from runtime.serving.requests import INPUT_NAMES, Defaults, decode, is_stop
from runtime.serving.responses import CLIENT, SHUTDOWN, SHUTTING_DOWN, STOP, TIMEOUT, Reply, Tensors

log = logging.getLogger("forgeline.triton")

PAUSE_AFTER_FAILURE_S = 1.0  # of the watch and metrics threads, so that what keeps failing does not fill the log
# Clients asked about in one period, in turn. A question wakes threads of both processes while the engine wants every core: 32
# streams lose 3 % of their tokens/s when each is asked about every 50 ms.
MAX_ASKED = 8


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config.get("parameters", {}).items()}
        if not parameters.get(ENGINE_DIR):
            raise pb_utils.TritonModelException(f"config.pbtxt has no parameter {ENGINE_DIR}; write it with `builder deploy`")
        engine_dir = Path(args["model_repository"], args["model_version"], parameters[ENGINE_DIR])  # absolute, or a copy in there
        try:
            manifest = load_manifest(engine_dir, verify_checksums=False)  # the engine verifies them
            self.options = parse_options(parameters, manifest)
            self.engine = Engine.load(engine_dir, runtime_config(self.options, manifest))
        except ForgelineError as error:
            raise pb_utils.TritonModelException(str(error)) from error
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        batched = config["max_batch_size"] > 0
        self.defaults = Defaults(
            tokenizer=self.engine.tokenizer,
            vocab_size=manifest.model.vocab_size,
            eos_token_ids=manifest.model.eos_token_ids,
            max_num_seqs=self.engine.config.max_num_seqs,
            batched=batched,
            exclude_input_in_output=self.options.exclude_input_in_output,
            add_special_tokens=self.options.add_special_tokens,
            skip_special_tokens=self.options.skip_special_tokens,
        )
        self.tensors = Tensors(pb_utils, batched)
        self.chunks = Chunks(self.options.stream_interval)
        self.orphan_watcher = OrphanWatcher.of_this_process()  # before the first call that waits for the server
        self.metrics = EngineMetrics(TritonRegistry(pb_utils), {"model": args["model_name"], "version": args["model_version"]})
        self.live: dict[Reply, str] = {}  # → the client's request id
        self.lock = threading.Lock()
        self.engine_ids = itertools.count()
        self.draining = False
        self.drain_deadline = math.inf
        self.closing = threading.Event()
        self.became_idle = threading.Event()
        self.threads = [
            threading.Thread(target=self._watch, name="forgeline-watch", daemon=True),
            threading.Thread(target=self._update_metrics, name="forgeline-metrics", daemon=True),
        ]
        for thread in self.threads:
            thread.start()
        path = own_control_path()
        self.control = ControlServer(path, self) if path is not None else None

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._start(request, sender)
            except Exception as error:
                _refuse(sender, _message(error), _code(error))

    def finalize(self) -> None:
        if self.control is not None:
            self.control.close()
        self.closing.set()
        self.became_idle.set()
        for thread in self.threads:
            thread.join()
        self.engine.close()
        self.metrics.close()
        self.tensors.small.cache_clear()
        self.orphan_watcher.stop()

    def drain(self, timeout_s: float) -> int:
        with self.lock:
            self.draining = True
            self.drain_deadline = time.monotonic() + timeout_s
            return len(self.live)

    def is_drained(self) -> bool:
        """Asked again and again by the control thread: what has not ended when the time is over is cancelled here."""
        with self.lock:
            replies = list(self.live)
        if time.monotonic() > self.drain_deadline:
            for reply in replies:
                if not reply.cancelled_by:
                    self._cancel(reply, SHUTDOWN)
        return not replies

    def _start(self, request: Any, sender: Any) -> None:
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs() if tensor.name() in INPUT_NAMES}
        if is_stop(inputs):
            self._stop(request.request_id(), sender)
            return
        parameters = json.loads(request.parameters() or "{}")
        generations = decode(inputs, parameters, self.defaults, timeout_us=request.timeout())
        if not self.decoupled:
            if any(generation.stream for generation in generations):
                raise InvalidRequest(
                    "stream is true but this model was deployed with decoupled_mode=false, which answers once; "
                    "deploy it with decoupled_mode=true to stream, or send stream=false"
                )
            if len(generations) > 1:
                raise InvalidRequest(
                    f"text_input holds {len(generations)} prompts but a model deployed with decoupled_mode=false answers one; "
                    "send one request for each"
                )
        reply = Reply(
            sender=sender,
            pb_utils=pb_utils,
            tensors=self.tensors,
            generations=generations,
            wanted=frozenset(request.requested_output_names()),
            decoupled=self.decoupled,
            chunks=self.chunks,
            metrics=self.metrics,
            on_end=self._ended,
        )
        with self.lock:
            if self.draining:
                raise QueueFull(SHUTTING_DOWN)
            self.live[reply] = request.request_id()
            self.chunks.streams += reply.streams
        try:
            for row, generation in enumerate(generations):
                engine_id = str(next(self.engine_ids))
                reply.engine_ids.append(engine_id)
                self.engine.submit(
                    self.engine.encode(generation.prompt, generation.add_special_tokens),
                    generation.params,
                    request_id=engine_id,
                    n=generation.n,
                    priority=generation.priority,
                    cache_salt=generation.cache_salt,
                    on_output=partial(reply.on_output, row),
                )
        except Exception as error:
            reply.fail(_message(error), _code(error))
        if reply.cancelled_by:  # the client left while its request was on its way in
            self._cancel(reply, reply.cancelled_by)

    def _stop(self, request_id: str, sender: Any) -> None:
        if not request_id:
            raise InvalidRequest("stop is true but the request has no id; send the id of the request to cancel")
        with self.lock:
            replies = [reply for reply, name in self.live.items() if name == request_id]
        for reply in replies:
            self._cancel(reply, STOP)
        sender.send(pb_utils.InferenceResponse(output_tensors=[]), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _cancel(self, reply: Reply, by: str) -> None:
        reply.cancelled_by = reply.cancelled_by or by
        for engine_id in reply.engine_ids:
            self.engine.cancel(engine_id)

    def _ended(self, reply: Reply) -> None:
        with self.lock:
            if self.live.pop(reply, None) is not None:
                self.chunks.streams -= reply.streams
            if not self.live:
                self.became_idle.set()
        if reply.unfinished:
            self._cancel(reply, "")

    def _watch(self) -> None:
        period = self.options.cancellation_check_period_ms / 1e3
        pause = period
        while not self.closing.wait(pause):
            if not self.engine.is_healthy():
                self._die()
            with self.lock:
                replies = [reply for reply in self.live if not reply.cancelled_by]
            pause = period
            for number, reply in enumerate(sorted(replies, key=lambda reply: reply.last_asked)):
                try:
                    self._look_after(reply, ask=number < MAX_ASKED)
                except Exception:  # this thread must live: without it no client that leaves is noticed, and no dead engine
                    pause = PAUSE_AFTER_FAILURE_S
                    log.exception("the look at one client failed; the next is in %g s", PAUSE_AFTER_FAILURE_S)

    def _look_after(self, reply: Reply, *, ask: bool) -> None:
        now = time.monotonic()
        if reply.deadline and now > reply.deadline:
            self._cancel(reply, TIMEOUT)
        elif ask:
            reply.last_asked = now
            if reply.client_has_gone():
                self._cancel(reply, CLIENT)

    def _die(self) -> None:
        log.critical("the engine's threads have ended; this backend process ends so that it can be restarted")
        with self.lock:
            replies = list(self.live)
        for reply in replies:
            try:
                reply.fail("the engine failed while the request ran; send it again", "INTERNAL")
            except Exception:
                log.exception("a client could not be told")
        os._exit(1)

    def _update_metrics(self) -> None:
        period = self.options.stats_check_period_ms / 1e3
        while not self.closing.is_set():
            idle = self.became_idle.wait(period)
            if idle:
                self.became_idle.clear()
                self.closing.wait(0.005)  # the loop frees the last request's blocks after its last output
            try:
                self.metrics.update(self.engine.stats(), {"cpu": _resident_bytes(), "gpu": 0, "pinned": 0})
            except Exception:
                log.exception("the metrics could not be brought up to date; the next attempt is in %g s", PAUSE_AFTER_FAILURE_S)
                self.closing.wait(PAUSE_AFTER_FAILURE_S)


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _message(error: Exception) -> str:
    if isinstance(error, ForgelineError):
        return str(error)
    log.error("a request could not be started", exc_info=error)
    return f"the request could not be started ({type(error).__name__}: {error}); this is a fault of the server"


def _code(error: Exception) -> str:
    if isinstance(error, UnsupportedFeature):
        return "UNSUPPORTED"
    if isinstance(error, QueueFull):
        return "UNAVAILABLE"
    return "INVALID_ARG" if isinstance(error, InvalidRequest) else "INTERNAL"


def _refuse(sender: Any, message: str, code: str) -> None:
    error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, code))
    response = pb_utils.InferenceResponse(output_tensors=[], error=error)
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
