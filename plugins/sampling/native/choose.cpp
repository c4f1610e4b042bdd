// A token for each row of logits, from softmax((x - best) / temperature) after min-p, then top-k, then top-p: what `choose` of
// runtime/logits.py means, and for the same uniform number the same token, except where two sums of weights round apart.
//
// Distance  (best - x) / temperature, 0 or more, so that its bits order like its value; a token's weight is e^-distance
// Order     likeliest first, lower ids first among equals: (bits of the distance, id) as one number. A draw without filters goes by
//           id instead.
// A row's sums are made in one order by one thread, so its token depends on the row alone.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/partitioner.h>
#include <oneapi/tbb/task_arena.h>

#include "../../paged_attention/native/simd.h"

namespace forgeline {

struct Choice {  // choose.py: CHOICE
    int64_t row;
    double top_p;    // 1: off
    double uniform;  // [0, 1)
    float best;      // the row's largest logit, finite
    float inverse_temperature;
    float farthest;  // distance that min-p keeps, -log(min_p); infinite: off
    int32_t top_k;   // 0, or no less than the vocabulary: off
};

namespace {

constexpr int64_t GROUP = 256;  // weights under one sum
constexpr int BINS = 256, BINS_PER_NAT = 8;
constexpr int64_t ROWS_ALONE = 2;  // cost less than to wake a thread

double below(double limit) { return std::nextafter(limit, 0.0); }

INLINE __m512 weights_of(__m512 distances) { return exp2_of(_mm512_mul_ps(distances, _mm512_set1_ps(-1.44269504f))); }

struct Candidate {
    Candidate(float distance, int32_t id) {
        std::memcpy(&order, &distance, sizeof distance);
        order = order << 32 | uint32_t(id);
    }

    bool operator<(const Candidate& other) const { return order < other.order; }

    int64_t id() const { return int64_t(order & 0xffffffff); }

    double weight() const {
        const uint32_t bits = uint32_t(order >> 32);
        float distance;
        std::memcpy(&distance, &bits, sizeof distance);
        return std::exp(-double(distance));
    }

    uint64_t order = 0;
};

// What one thread keeps from row to row.
struct Buffers {
    std::vector<float> distances;  // of the tokens that a bound did not exclude, by id
    std::vector<int32_t> ids, bins;
    std::vector<float> weights;
    std::vector<Candidate> sorted;
    std::vector<double> running;  // sums up to and with each

    void at_least(int64_t width) {
        const size_t size = size_t(width) + LANES;
        if (ids.size() >= size) return;
        distances.resize(size), weights.resize(size), bins.resize(size);
        ids.resize(size);  // last: there is memory for all
    }
};

class Row {
public:
    Row(const float* x, int64_t width, const Choice& choice, Buffers& buffers)
        : m_x(x), m_width(width), m_choice(choice), m_buffers(buffers) {}

    int64_t choose() {
        const bool few = m_choice.top_k > 0 && m_choice.top_k < m_width;
        if (few || (m_choice.top_p >= 1 && m_choice.farthest < INFINITY)) return choose_filtered(few);
        return m_choice.top_p < 1 ? choose_nucleus() : choose_freely();
    }

private:
    // Sixteen from an id on; infinite behind the vocabulary, so that nothing there has a weight.
    INLINE __m512 distances(int64_t id) const {
        const int64_t left = m_width - id;
        const __mmask16 there = left >= LANES ? __mmask16(0xffff) : __mmask16((1u << left) - 1);
        const __m512 x = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), there, m_x + id);
        const __m512 best = _mm512_set1_ps(m_choice.best + 0.0f);  // never -0, from which +0 would have a negative distance
        return _mm512_mul_ps(_mm512_sub_ps(best, x), _mm512_set1_ps(m_choice.inverse_temperature));
    }

    // Sums of the weights of GROUP tokens each, up to and with each group.
    double sum_groups(float farthest) {
        m_buffers.running.clear();
        const __m512 limit = _mm512_set1_ps(farthest);
        double total = 0;
        for (int64_t begin = 0; begin < m_width; begin += GROUP) {
            __m512 sum = _mm512_setzero_ps();
            for (int64_t id = begin; id < std::min(begin + GROUP, m_width); id += LANES) {
                const __m512 d = distances(id);
                sum = _mm512_mask_add_ps(sum, _mm512_cmp_ps_mask(d, limit, _CMP_LE_OQ), sum, weights_of(d));
            }
            m_buffers.running.push_back(total += double(_mm512_reduce_add_ps(sum)));
        }
        return total;
    }

    int64_t choose_freely() {
        const double total = sum_groups(INFINITY);
        const std::vector<double>& sums = m_buffers.running;
        const double target = std::min(m_choice.uniform * total, below(total));
        const int64_t group = std::upper_bound(sums.begin(), sums.end(), target) - sums.begin();

        alignas(64) float weights[GROUP] = {};
        const int64_t begin = group * GROUP, end = std::min(begin + GROUP, m_width);
        for (int64_t id = begin; id < end; id += LANES) _mm512_store_ps(weights + (id - begin), weights_of(distances(id)));
        double running[GROUP], sum = 0;
        for (int64_t i = 0; i < GROUP; ++i) running[i] = sum += double(weights[i]);
        // The group's sum was rounded differently: the target stays inside it.
        const double rest = std::min(target - (group ? sums[group - 1] : 0), below(sum));
        return std::min(begin + (std::upper_bound(running, running + GROUP, rest) - running), m_width - 1);
    }

    // By top-k or min-p, after which few tokens are left: these are sorted.
    int64_t choose_filtered(bool few) {
        const size_t count = collect(few ? std::min(m_choice.farthest, distance_of_kth()) : m_choice.farthest);
        sort(count, [](size_t) { return true; });
        std::vector<Candidate>& sorted = m_buffers.sorted;
        if (few && sorted.size() > size_t(m_choice.top_k)) sorted.erase(sorted.begin() + m_choice.top_k, sorted.end());
        std::vector<double>& running = m_buffers.running;
        running.clear();
        double sum = 0;
        for (const Candidate& each : sorted) running.push_back(sum += each.weight());
        // top-p keeps a token while those before it hold less than p: the smallest set that reaches p, never an empty one
        if (m_choice.top_p < 1) {
            const auto last = std::lower_bound(running.begin(), running.end() - 1, m_choice.top_p * sum);
            running.erase(last + 1, running.end());
        }
        const double target = std::min(m_choice.uniform * running.back(), below(running.back()));
        return sorted[std::upper_bound(running.begin(), running.end(), target) - running.begin()].id();
    }

    // By top-p of what min-p leaves, which may be most of the vocabulary: two bins of a histogram are sorted. One holds the last
    // token that is kept, the other the one that is drawn.
    int64_t choose_nucleus() {
        const double total = sum_groups(m_choice.farthest);
        // A weight below (1 - p) * total / V is never kept: all weights up to it sum to less than 1 - p of the total.
        const double least = std::max((1 - m_choice.top_p) * total / double(m_width), double(FLT_MIN));
        const size_t count = collect(std::min(m_choice.farthest, float(-std::log(least) + 1e-3)));
        const double goal = m_choice.top_p * total;
        double sums[BINS] = {};  // of weights, up to and with each bin
        weigh(count, sums);
        for (int bin = 1; bin < BINS; ++bin) sums[bin] += sums[bin - 1];

        const int last = std::min(int(std::lower_bound(sums, sums + BINS, goal) - sums), BINS - 1);
        const double kept = sort_bin(count, sums, last, goal);
        const double target = std::min(m_choice.uniform * kept, below(kept));
        const int drawn = std::min(int(std::upper_bound(sums, sums + BINS, target) - sums), last);
        if (drawn != last) sort_bin(count, sums, drawn, goal);
        const std::vector<double>& running = m_buffers.running;  // of those that are kept, since no two sums of weights round alike
        const size_t at = std::upper_bound(running.begin(), running.end(), target) - running.begin();
        return m_buffers.sorted[std::min(at, running.size() - 1)].id();
    }

    // Tokens no farther than the limit, by id. Returns how many.
    size_t collect(float limit) {
        m_buffers.at_least(m_width);
        size_t count = 0;
        const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        for (int64_t id = 0; id < m_width; id += LANES) {
            const __m512 d = distances(id);
            const __mmask16 near = _mm512_cmp_ps_mask(d, _mm512_set1_ps(limit), _CMP_LE_OQ);
            if (near == 0) continue;
            _mm512_storeu_ps(&m_buffers.distances[count], _mm512_maskz_compress_ps(near, d));
            const __m512i ids = _mm512_add_epi32(_mm512_set1_epi32(int(id)), lanes);
            _mm512_storeu_si512(&m_buffers.ids[count], _mm512_maskz_compress_epi32(near, ids));
            count += size_t(_mm_popcnt_u32(near));
        }
        return count;
    }

    // No less than the distance of the k-th nearest, and close to it: that of the k-th among the nearest of many small sets.
    float distance_of_kth() {
        m_buffers.at_least(m_width);
        const int64_t vectors = (m_width + LANES - 1) / LANES, k = m_choice.top_k;
        const int64_t step = std::max(int64_t(1), m_width / std::max(int64_t(64), 4 * k));
        std::vector<float>& nearest = m_buffers.weights;
        int64_t count = 0;
        for (int64_t begin = 0; begin < vectors; begin += step, count += LANES) {
            __m512 least = _mm512_set1_ps(INFINITY);
            for (int64_t i = begin; i < std::min(begin + step, vectors); ++i) least = _mm512_min_ps(least, distances(i * LANES));
            _mm512_storeu_ps(&nearest[count], least);
        }
        std::nth_element(nearest.begin(), nearest.begin() + (k - 1), nearest.begin() + count);
        return nearest[k - 1];
    }

    // Bin and weight of each collected token; adds the weights up by bin.
    void weigh(size_t count, double* mass) {
        for (size_t i = 0; i < count; i += LANES) {
            const __m512 d = _mm512_loadu_ps(&m_buffers.distances[i]);
            const __m512 bin = _mm512_min_ps(_mm512_mul_ps(d, _mm512_set1_ps(BINS_PER_NAT)), _mm512_set1_ps(BINS - 1));
            _mm512_storeu_si512(&m_buffers.bins[i], _mm512_cvttps_epi32(bin));
            _mm512_storeu_ps(&m_buffers.weights[i], weights_of(d));
        }
        for (size_t i = 0; i < count; ++i) mass[m_buffers.bins[i]] += double(m_buffers.weights[i]);
    }

    // Those of the first `count` collected tokens that are wanted, likeliest first.
    template <class F>
    void sort(size_t count, const F& wanted) {
        std::vector<Candidate>& sorted = m_buffers.sorted;
        sorted.clear();
        for (size_t i = 0; i < count; ++i)
            if (wanted(i)) sorted.emplace_back(m_buffers.distances[i], m_buffers.ids[i]);
        std::sort(sorted.begin(), sorted.end());
    }

    // One bin, and running sums of its tokens as long as those before a token weigh less than the goal. Returns the last sum.
    double sort_bin(size_t count, const double* sums, int bin, double goal) {
        sort(count, [&](size_t i) { return m_buffers.bins[i] == bin; });
        m_buffers.running.clear();
        double sum = bin ? sums[bin - 1] : 0;
        for (const Candidate& each : m_buffers.sorted) {
            if (sum >= goal) break;
            m_buffers.running.push_back(sum += each.weight());
        }
        return sum;
    }

    const float* m_x;
    int64_t m_width;
    const Choice& m_choice;
    Buffers& m_buffers;
};

void choose(const float* logits, int64_t width, const Choice* choices, int64_t count, int threads, int64_t* tokens) {
    const auto one = [=](int64_t i) {
        thread_local Buffers buffers;
        tokens[i] = Row(logits + choices[i].row * width, width, choices[i], buffers).choose();
    };
    if (threads <= 1 || count <= ROWS_ALONE) {
        for (int64_t i = 0; i < count; ++i) one(i);
    } else {
        tbb::task_arena(threads).execute([&] { tbb::parallel_for(int64_t(0), count, one, tbb::simple_partitioner()); });
    }
}

}  // namespace
}  // namespace forgeline

// logits f32 [rows, width], choices and tokens [count]. False: no memory.
extern "C" __attribute__((visibility("default"))) bool forgeline_choose(const float* logits, int64_t width,
                                                                        const forgeline::Choice* choices, int64_t count,
                                                                        int32_t threads, int64_t* tokens) {
    try {
        forgeline::choose(logits, width, choices, count, threads, tokens);
        return true;
    } catch (const std::bad_alloc&) {
        return false;
    }
}
