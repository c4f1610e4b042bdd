"""The main job, end to end: build SmolLM2-135M-Instruct for the CPU, deploy it, start the real Triton, stream answers.

Three chats over gRPC streaming at the same time, one over HTTP generate_stream; prints the answers as they grow, then a table of
TTFT, TPOT and tokens/s. Leaves `demo/` (engine, model repository, server log); stops the server.
"""

from __future__ import annotations

import argparse
import http.client
import json
import queue
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpcclient

from builder.deploy import deploy
from runtime.serving.server import TritonServer
from runtime.tokenizer import Tokenizer

MODEL = "smollm2"
# The first is checked for "Paris": unlike shorter questions, this model has no other answer close by that rounding could prefer.
QUESTIONS = (
    ("grpc", "Tell me the capital of France in one sentence."),
    ("grpc", "Write one sentence about the sea."),
    ("grpc", "Name three colours."),
    ("http", "Why is the sky blue? Answer in one sentence."),
)


@dataclass
class Answer:
    transport: str
    question: str
    start: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    error: str = ""

    def add(self, text: str, num_tokens: int) -> None:
        self.text += text
        self.arrivals.append(time.perf_counter())
        self.tokens.append(num_tokens)

    @property
    def ttft_ms(self) -> float:
        return (self.arrivals[0] - self.start) * 1e3

    @property
    def tpot_ms(self) -> float:
        return (self.arrivals[-1] - self.arrivals[0]) * 1e3 / max(1, sum(self.tokens) - 1)


def tensor(name: str, values: object, dtype: str) -> grpcclient.InferInput:
    kinds = {"BYTES": np.object_, "INT32": np.int32, "BOOL": np.bool_}
    array = np.array(values, dtype=kinds[dtype])
    result = grpcclient.InferInput(name, list(array.shape), dtype)
    result.set_data_from_numpy(array)
    return result


def ask_grpc(url: str, prompt: str, max_tokens: int, answer: Answer) -> None:
    results: queue.Queue[tuple[object, object]] = queue.Queue()
    with grpcclient.InferenceServerClient(url) as client:
        client.start_stream(callback=lambda result, error: results.put((result, error)))
        answer.start = time.perf_counter()
        client.async_stream_infer(
            MODEL,
            [
                tensor("text_input", [[prompt.encode()]], "BYTES"),
                tensor("max_tokens", [[max_tokens]], "INT32"),
                tensor("stream", [[True]], "BOOL"),
                tensor("exclude_input_in_output", [[True]], "BOOL"),
                tensor("return_num_output_tokens", [[True]], "BOOL"),
            ],
            enable_empty_final_response=True,
        )
        while True:
            result, error = results.get(timeout=120)
            if error is not None:
                answer.error = str(error)
                return
            text, count = result.as_numpy("text_output"), result.as_numpy("num_output_tokens")
            if text is not None:
                answer.add(text.reshape(-1)[0].decode(), int(count.reshape(-1)[0]) if count is not None else 1)
            if result.get_response().parameters["triton_final_response"].bool_param:
                return


def ask_http(port: int, prompt: str, max_tokens: int, answer: Answer) -> None:
    body = json.dumps(
        {
            "text_input": prompt,
            "max_tokens": max_tokens,
            "stream": True,
            "exclude_input_in_output": True,
            "return_num_output_tokens": True,
        }
    )
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    answer.start = time.perf_counter()
    connection.request("POST", f"/v2/models/{MODEL}/generate_stream", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    for line in response:
        if not line.startswith(b"data:"):
            continue
        event = json.loads(line[5:])
        if "error" in event:
            answer.error = event["error"]
            return
        answer.add(event["text_output"], event.get("num_output_tokens", 1))
    connection.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--directory", type=Path, default=Path("demo"))
    options = parser.parse_args()

    engine, repository = options.directory / "engine", options.directory / "model_repository"
    print(f"1. build   SmolLM2-135M-Instruct, {options.precision}, target cpu → {engine}", flush=True)
    subprocess.run(
        [sys.executable, "-m", "builder.cli", "build", "smollm2-135m-instruct", "--target", "cpu",
         "--precision", options.precision, "--output", str(engine)],
        check=True,
    )  # fmt: skip
    print(f"2. deploy  → {repository}/{MODEL}", flush=True)
    deploy(engine, repository, MODEL)
    tokenizer = Tokenizer.load(engine / "tokenizer")
    print("3. serve   tritonserver, ports chosen free", flush=True)
    with TritonServer(repository, log_file=options.directory / "tritonserver.log") as server:
        print(f"           ready: HTTP {server.http_port}, gRPC {server.grpc_port}, metrics {server.metrics_port}", flush=True)
        answers = [Answer(transport, question) for transport, question in QUESTIONS]
        threads = []
        for answer in answers:
            prompt = tokenizer.apply_chat_template([{"role": "user", "content": answer.question}], add_generation_prompt=True)
            if answer.transport == "grpc":
                arguments = (f"127.0.0.1:{server.grpc_port}", prompt, options.max_tokens, answer)
                threads.append(threading.Thread(target=ask_grpc, args=arguments))
            else:
                threads.append(threading.Thread(target=ask_http, args=(server.http_port, prompt, options.max_tokens, answer)))
        print("4. chat    three gRPC streams and one HTTP generate_stream at once\n", flush=True)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for answer in answers:
        print(f"   [{answer.transport}] {answer.question}\n          {answer.error or answer.text.strip()}\n")
    print(f"   {'transport':<10}{'tokens':>7}{'TTFT ms':>10}{'TPOT ms':>10}{'tokens/s':>10}")
    failed = [answer for answer in answers if answer.error or not answer.arrivals]
    for answer in answers:
        if answer not in failed:
            rate = 1e3 / answer.tpot_ms if answer.tpot_ms else 0.0
            print(f"   {answer.transport:<10}{sum(answer.tokens):>7}{answer.ttft_ms:>10.1f}{answer.tpot_ms:>10.2f}{rate:>10.1f}")
    print("5. stopped")
    if failed or "Paris" not in answers[0].text:
        print(
            "error: the demo did not get the answers it asked for; see " + str(options.directory / "tritonserver.log"),
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
