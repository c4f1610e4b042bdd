"""The loops of threads.h, compiled on their own: each task runs once, and what it wrote is seen when the loop has ended."""

from __future__ import annotations

import subprocess
from pathlib import Path

import openvino as ov
import pytest

from plugins import quantized_matmul
from plugins.quantized_matmul import native

LOOPS = 20_000  # below 2**16, after which their numbers begin again
PROGRAM = r"""
#include "threads.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include <oneapi/tbb/global_control.h>

namespace {

constexpr int64_t SIZES[] = {2, 3, 1, 17, 2, 64, 0, 5, 200, 2};

// Plain memory: only the loops order who writes it.
template <class Kind>
int64_t wrong(int64_t loops) {
    Kind threads;
    int64_t found = 0, before = 0;
    // Each thread has come, since it holds one of these tasks until all are held; and the caller's ends long before the others.
    for (int turn = 0; std::is_same<Kind, forgeline::Team>::value && turn < 3; ++turn) {
        const std::thread::id caller = std::this_thread::get_id();
        std::atomic<int64_t> held{0}, ended{0};
        threads.run(threads.count(), [&](int64_t) {
            for (++held; held < threads.count();) std::this_thread::yield();
            if (std::this_thread::get_id() != caller) std::this_thread::sleep_for(std::chrono::milliseconds(20));
            ++ended;
        });
        found += ended != threads.count();
    }
    std::vector<int64_t> runs(200), sums(200);
    for (int64_t loop = 0; loop < loops; ++loop) {
        const int64_t tasks = SIZES[loop % 10];
        threads.run(tasks, [&](int64_t i) {
            if ((i + loop) % 500 == 0) std::this_thread::yield();  // while others end theirs
            ++runs[i];
            sums[i] = before + i;
        });
        for (int64_t i = 0; i < tasks; ++i) {
            found += runs[i] != 1 || sums[i] != before + i;
            runs[i] = 0;
        }
        for (int64_t ran : runs) found += ran != 0;
        before = loop + (tasks ? sums[tasks - 1] % 7 : 0);
    }
    return found;
}

}  // namespace

int main(int, char** arguments) {
    const std::string kind = arguments[1];
    const int64_t loops = std::atoll(arguments[3]);
    const tbb::global_control more(tbb::global_control::max_allowed_parallelism, 16);  // than there are cores
    tbb::task_arena arena(std::atoi(arguments[2]));
    arena.execute([&] {
        std::printf("%d %lld\n", tbb::this_task_arena::max_concurrency(),
                    static_cast<long long>(kind == "team" ? wrong<forgeline::Team>(loops) : wrong<forgeline::Arena>(loops)));
    });
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := native.why_not():
        pytest.skip(reason)
    compiler = native.compiler()
    assert compiler is not None
    directory, wheel = tmp_path_factory.mktemp("threads"), Path(ov.__file__).parent
    (directory / "main.cpp").write_text(PROGRAM, encoding="utf-8")
    (tbb,) = sorted((wheel / "libs").glob("libtbb.so.*"))[:1]
    command = [
        *compiler, "-O3", "-std=c++17", f"-I{wheel / 'include'}", f"-I{Path(quantized_matmul.__file__).parent}",
        str(directory / "main.cpp"), "-o", str(directory / "main"), str(tbb), f"-Wl,-rpath,{tbb.parent}", "-pthread",
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return directory / "main"


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("kind", ["team", "arena"])
def test_each_task_of_each_loop_runs_once(program: Path, kind: str, threads: int) -> None:
    loops = LOOPS if kind == "team" else LOOPS // 20
    result = subprocess.run([program, kind, str(threads), str(loops)], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.split() == [str(threads), "0"]
