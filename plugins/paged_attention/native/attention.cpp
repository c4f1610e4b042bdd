#include "attention.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "../../quantized_matmul/threads.h"
#include "store.h"
#include "tile.h"

namespace forgeline {
namespace {

constexpr int64_t ALONE = 96;             // rows times blocks that one thread attends to sooner than it wakes another,
constexpr int64_t ALONE_AWAKE = 12;       // or one that is awake
constexpr int FEW_ROWS = 8;               // of a tile, that wait for memory
constexpr int64_t FAR = 2;                // blocks to the one that they fetch into the second level cache
constexpr int64_t TASKS_PER_THREAD = 64;  // below, spans of the same rows become tasks

struct Task {  // some tokens of a sequence, some heads that share keys, some spans
    int64_t sequence, kv_head, head, heads;
    int64_t token, tokens;  // of the step
    int64_t span, spans;
    int64_t group;  // of tasks that share rows, in the order of spans; -1: alone
    bool stores;    // its tokens' keys and values, which no other task reads

    int rows() const { return int(heads * tokens); }
};

struct Group {  // of tasks whose results are added up by the last to end
    int64_t first_task, tasks;
    size_t memory;  // of the first result, in floats
    std::atomic<int64_t> left;

    Group(int64_t first, int64_t count, size_t at) : first_task(first), tasks(count), memory(at), left(0) {}
};

}  // namespace

class Attention::Plan {
public:
    Plan(const AttentionShape& shape, const Sequences& sequences, Threads& threads)
        : m_shape(shape), m_sequences(sequences), m_threads(threads) {
        divide();
        m_alone = m_work <= (m_threads.awake() ? ALONE_AWAKE : ALONE) || m_threads.count() == 1;
        split_spans();
    }

    void run(const AttentionTensors& in) {
        m_in = in;
        for (const auto& group : m_groups) group->left.store(group->tasks, std::memory_order_relaxed);
        on_threads(m_to_store.size() * m_shape.num_kv_heads, [&](int64_t i) {
            const auto& [sequence, block] = m_to_store[i / m_shape.num_kv_heads];
            const int64_t past = m_sequences.past_lens[sequence];
            const int64_t begin = m_sequences.begins[sequence], end = m_sequences.begins[sequence + 1];
            store(sequence, i % m_shape.num_kv_heads, std::max(begin, begin + block * BLOCK - past),
                  std::min(end, begin + (block + 1) * BLOCK - past));
        });
        on_threads(m_tasks.size(), [&](int64_t i) { attend_to(m_tasks[i], i); });
    }

private:
    int64_t position(const Task& task, int64_t token) const {
        return m_sequences.past_lens[task.sequence] + token - m_sequences.begins[task.sequence];
    }
    int64_t first_seen(int64_t position) const {
        return m_shape.sliding_window > 0 ? std::max<int64_t>(0, position - m_shape.sliding_window + 1) : 0;
    }
    const int32_t* blocks_of(int64_t sequence) const { return m_sequences.blocks + m_sequences.block_begins[sequence]; }
    uint8_t* keys_of(int64_t block, int64_t head) const {
        return m_in.key_pool + (block * m_shape.num_kv_heads + head) * m_shape.key_bytes();
    }
    uint8_t* values_of(int64_t block, int64_t head) const {
        return m_in.value_pool + (block * m_shape.num_kv_heads + head) * m_shape.value_bytes();
    }

    // Tasks of all rows; long ones first, since what is left at the end should be short.
    void divide() {
        const int64_t per_kv_head = m_shape.num_heads / m_shape.num_kv_heads;
        const int64_t most_heads = std::min<int64_t>(per_kv_head, MAX_ROWS), most_tokens = MAX_ROWS / most_heads;
        for (const bool several : {true, false}) {
            for (int64_t s = 0; s < m_sequences.count; ++s) {
                const int64_t begin = m_sequences.begins[s], end = m_sequences.begins[s + 1], past = m_sequences.past_lens[s];
                if (begin == end || (end - begin > most_tokens) != several) continue;
                const bool one_reader = !several && most_heads == per_kv_head;
                for (int64_t block = past / BLOCK; !one_reader && block * BLOCK < past + end - begin; ++block)
                    m_to_store.emplace_back(s, block);
                for (int64_t last = end; last > begin; last -= std::min(most_tokens, last - begin)) {
                    const int64_t first = std::max(begin, last - most_tokens);
                    const int64_t low = first_seen(past + first - begin), high = past + last - begin - 1;
                    for (int64_t head = 0; head < m_shape.num_heads;) {
                        const int64_t kv_head = head / per_kv_head;
                        const int64_t heads = std::min(most_heads, (kv_head + 1) * per_kv_head - head);
                        const int64_t spans = high / SPAN - low / SPAN + 1, group = -1;
                        m_tasks.push_back({s, kv_head, head, heads, first, last - first, low / SPAN, spans, group, one_reader});
                        m_work += m_tasks.back().rows() * (high / BLOCK - low / BLOCK + 1);
                        head += heads;
                    }
                }
            }
        }
    }

    void split_spans() {
        const int64_t wanted = m_alone ? 0 : m_threads.count() * TASKS_PER_THREAD;
        if (int64_t(m_tasks.size()) >= wanted) return;
        std::vector<Task> whole;
        whole.swap(m_tasks);
        size_t memory = 0;
        for (Task task : whole) {
            const int64_t spans = task.spans;
            if (spans > 1) {
                task.group = int64_t(m_groups.size());
                m_groups.push_back(std::make_unique<Group>(m_tasks.size(), spans, memory));
                memory += spans * Partial::floats(task.rows(), m_shape.head_dim);
            }
            task.spans = 1;
            for (int64_t i = 0; i < spans; ++i, ++task.span) m_tasks.push_back(task);
        }
        m_partials.reset(new float[memory]);
    }

    template <class F>
    void on_threads(int64_t count, const F& f) const {
        if (m_alone) {
            for (int64_t i = 0; i < count; ++i) f(i);
        } else {
            m_threads.run(count, f);
        }
    }

    // Tokens [begin, end) of the step.
    void store(int64_t sequence, int64_t head, int64_t begin, int64_t end) const {
        const int64_t dim = m_shape.head_dim;
        for (int64_t token = begin; token < end; ++token) {
            const int64_t at = m_sequences.past_lens[sequence] + token - m_sequences.begins[sequence];
            const int64_t block = blocks_of(sequence)[at / BLOCK];
            store_key(m_shape, m_in.k + token * m_in.kv_stride + head * dim, keys_of(block, head), int(at % BLOCK));
            store_value(m_shape, m_in.v + token * m_in.kv_stride + head * dim, values_of(block, head), int(at % BLOCK));
        }
    }

    void attend_to(const Task& task, int64_t index) const {
        thread_local std::unique_ptr<Tile> tile_of_thread;
        thread_local std::unique_ptr<float[]> memory;
        if (!tile_of_thread) {
            tile_of_thread.reset(new Tile);
            memory.reset(new float[2 * Partial::floats(MAX_ROWS, MAX_HEAD_DIM)]);
        }
        Tile& tile = *tile_of_thread;
        tile.start(m_shape, task.rows());
        const int64_t dim = m_shape.head_dim;
        for (int64_t t = 0, row = 0; t < task.tokens; ++t) {
            const int64_t at = position(task, task.token + t);
            for (int64_t h = 0; h < task.heads; ++h, ++row) {
                tile.first[row] = first_seen(at);
                tile.last[row] = at + 1;
                tile.set_query(int(row), m_in.q + (task.token + t) * m_in.q_stride + (task.head + h) * dim);
            }
        }
        const int64_t end = position(task, task.token + task.tokens);
        const int64_t low = first_seen(position(task, task.token));

        const int rows = task.rows();
        const size_t floats = Partial::floats(rows, dim);
        const Group* group = task.group < 0 ? nullptr : m_groups[task.group].get();
        float* mine = group ? m_partials.get() + group->memory + (index - group->first_task) * floats : memory.get();
        const Partial total(mine, rows), next(memory.get() + floats, rows);
        for (int64_t span = task.span; span < task.span + task.spans; ++span) {
            attend_to_span(tile, task, index, std::max(low, span * SPAN) / BLOCK, std::min(end, (span + 1) * SPAN));
            tile.end_span(span == task.span ? total : next);
            if (span > task.span) total.add(next, rows, dim);
        }
        if (!group) return write(task, total);
        if (m_groups[task.group]->left.fetch_sub(1) > 1) return;  // another span is still under way
        float* all = m_partials.get() + group->memory;
        const Partial sum(all, rows);
        for (int64_t i = 1; i < group->tasks; ++i) sum.add(Partial(all + i * floats, rows), rows, dim);
        write(task, sum);
    }

    // Blocks of the sequence from `block` on, keys before `end`.
    void attend_to_span(Tile& tile, const Task& task, int64_t index, int64_t block, int64_t end) const {
        const int32_t* blocks = blocks_of(task.sequence);
        const int64_t all = position(task, task.token + task.tokens), shift = task.token + task.tokens - all;
        tile.start_span();
        for (; block * BLOCK < end; ++block) {
            tile.next = ahead(task, index, block + 1, end);
            tile.far = tile.rows <= FEW_ROWS ? ahead(task, index, block + FAR, end) : Tile::Stored{};
            if (task.stores) {
                const int64_t begin = std::max(all - task.tokens, block * BLOCK), stop = std::min(all, (block + 1) * BLOCK);
                store(task.sequence, task.kv_head, begin + shift, stop + shift);
            }
            tile.add_block(keys_of(blocks[block], task.kv_head), values_of(blocks[block], task.kv_head), block * BLOCK);
        }
    }

    // What the tile fetches while it is busy: a block of the span, or one of the task that this thread is likely to take next.
    Tile::Stored ahead(const Task& task, int64_t index, int64_t block, int64_t end) const {
        const Task* of = &task;
        if (block * BLOCK >= end) {
            index += m_alone ? 1 : m_threads.count();
            if (index >= int64_t(m_tasks.size())) return {};
            of = &m_tasks[index];
            block -= (end + BLOCK - 1) / BLOCK;
            block += std::max(first_seen(position(*of, of->token)), of->span * SPAN) / BLOCK;
            if (block * BLOCK >= position(*of, of->token + of->tokens)) return {};
        }
        const int32_t at = blocks_of(of->sequence)[block];
        return {keys_of(at, of->kv_head), values_of(at, of->kv_head)};
    }

    void write(const Task& task, const Partial& total) const {
        const int64_t dim = m_shape.head_dim;
        for (int64_t row = 0; row < task.rows(); ++row) {
            const int64_t token = task.token + row / task.heads, head = task.head + row % task.heads;
            const __m512 factor = _mm512_set1_ps(1.0f / total.sum[row]);
            float* to = m_in.out + (token * m_shape.num_heads + head) * dim;
            for (int64_t i = 0; i < dim; i += LANES)
                _mm512_storeu_ps(to + i, _mm512_mul_ps(_mm512_loadu_ps(total.values + row * dim + i), factor));
        }
    }

    const AttentionShape m_shape;
    const Sequences m_sequences;
    Threads& m_threads;
    AttentionTensors m_in{};
    bool m_alone = true;
    int64_t m_work = 0;  // rows times blocks
    std::vector<Task> m_tasks;
    std::vector<std::pair<int64_t, int64_t>> m_to_store;  // sequence, its block
    std::vector<std::unique_ptr<Group>> m_groups;
    std::unique_ptr<float[]> m_partials;
};

namespace {

size_t bytes_of(Element e, int64_t dim) {  // of a block of one head
    constexpr int64_t SCALE = 2 * sizeof(float);
    if (e == Element::U8) return BLOCK * (dim + SCALE);
    if (e == Element::U4) return BLOCK * (dim / 2 + dim / 32 * SCALE);
    return BLOCK * dim * size_of(e);
}

}  // namespace

bool AttentionShape::supported() const {
    const int64_t multiple = values == Element::U4 ? 32 : LANES;
    return num_kv_heads > 0 && num_heads % num_kv_heads == 0 && head_dim % multiple == 0 && head_dim > 0 &&
           head_dim <= MAX_HEAD_DIM && sliding_window >= 0 && keys != Element::U4;
}

size_t AttentionShape::key_bytes() const { return bytes_of(keys, head_dim); }

size_t AttentionShape::value_bytes() const { return bytes_of(values, head_dim); }

Attention::Attention(const AttentionShape& shape, const Sequences& sequences, Threads& threads)
    : m_plan(std::make_unique<Plan>(shape, sequences, threads)) {}

Attention::~Attention() = default;

void Attention::run(const AttentionTensors& tensors) { m_plan->run(tensors); }

}  // namespace forgeline
