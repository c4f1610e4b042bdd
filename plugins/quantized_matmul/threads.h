// Who runs the parts of a kernel.
#pragma once

#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/partitioner.h>
#include <oneapi/tbb/task_arena.h>
#include <oneapi/tbb/task_group.h>

namespace forgeline {

class Threads {
public:
    int64_t count() const { return m_count; }
    bool awake() const { return m_awake; }  // a loop costs less than a µs, so that small tasks pay

    // f(0) … f(tasks - 1), in any order, and returns when all have ended. Tasks are grabbed one by one, so they should not be small.
    template <class F>
    void run(int64_t tasks, const F& f) {
        if (tasks <= 1 || m_count == 1) {
            for (int64_t i = 0; i < tasks; ++i) f(i);
        } else {
            share(tasks, [](const void* each, int64_t i) { (*static_cast<const F*>(each))(i); }, &f);
        }
    }

protected:
    ~Threads() = default;

    using Function = void (*)(const void*, int64_t);

    virtual void share(int64_t tasks, Function function, const void* context) = 0;

    explicit Threads(bool awake) : m_awake(awake) {}

    const bool m_awake;
    const int64_t m_count = std::max(1, tbb::this_task_arena::max_concurrency());
};

// The caller's TBB arena, asked anew for every loop: 2 to 10 µs each.
class Arena final : public Threads {
public:
    Arena() : Threads(false) {}

private:
    void share(int64_t tasks, Function function, const void* context) override {
        const auto call = [=](int64_t i) { function(context, i); };
        if (tasks <= m_count) tbb::parallel_for(int64_t(0), tasks, call, tbb::static_partitioner());
        else tbb::parallel_for(int64_t(0), tasks, call, tbb::simple_partitioner());
    }
};

// Threads of that arena which wait for the next loop awake, as long as the team lives: a loop costs a fraction of a µs. The caller
// never waits for a thread to come, only for tasks that one has taken, so the team works with as many as the arena can spare.
class Team final : public Threads {
public:
    Team() : Threads(true) {
        for (int64_t i = 1; i < m_count; ++i) m_group.run([this] { help(); });
    }

    ~Team() noexcept(false) {
        m_ended.store(true, std::memory_order_release);
        m_group.wait();
    }

private:
    static constexpr int PATIENCE = 4096;  // pauses until the core is offered to others
    static constexpr int BITS = 24;        // of a count of tasks
    static constexpr uint64_t MASK = (uint64_t(1) << BITS) - 1;

    void share(int64_t tasks, Function function, const void* context) override {
        m_function.store(function, std::memory_order_relaxed);
        m_context.store(context, std::memory_order_relaxed);
        m_done.store(0, std::memory_order_relaxed);
        m_loop.store(++m_number << 2 * BITS | uint64_t(tasks) << BITS, std::memory_order_release);
        while (take()) {
        }
        for (int i = 0; m_done.load(std::memory_order_acquire) < tasks; ++i) rest(i);
    }

    void help() {
        for (int i = 0; !m_ended.load(std::memory_order_acquire); ++i) {
            if (take()) i = 0;
            else rest(i);
        }
    }

    // False when there is nothing left. What was read of a loop belongs to it if its next task is still the one seen before.
    bool take() {
        uint64_t loop = m_loop.load(std::memory_order_acquire);
        for (;;) {
            const uint64_t next = loop & MASK, tasks = loop >> BITS & MASK;
            if (next >= tasks) return false;
            const Function function = m_function.load(std::memory_order_relaxed);
            const void* context = m_context.load(std::memory_order_relaxed);
            if (!m_loop.compare_exchange_weak(loop, loop + 1, std::memory_order_acq_rel)) continue;
            [&]() noexcept { function(context, int64_t(next)); }();  // a task that failed would be waited for without end
            m_done.fetch_add(1, std::memory_order_release);
            return true;
        }
    }

    static void rest(int turn) {
        if (turn % PATIENCE == PATIENCE - 1) sched_yield();
        else _mm_pause();
    }

    alignas(64) std::atomic<uint64_t> m_loop{0};  // number of the loop, its tasks, the next of them
    alignas(64) std::atomic<int64_t> m_done{0};
    alignas(64) std::atomic<Function> m_function{nullptr};
    std::atomic<const void*> m_context{nullptr};
    std::atomic<bool> m_ended{false};
    uint64_t m_number = 0;
    tbb::task_group m_group;
};

}  // namespace forgeline
