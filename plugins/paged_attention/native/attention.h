// Paged attention on AVX512, on a KV cache that it writes itself.
//
//   out[t, h] = sum over keys s visible to t of  softmax(scale * q[t, h] . k[s])  *  v[s]
//
// Keys and values of the step's tokens are stored first, and read back as they are stored: a token sees the same keys whichever
// step computes it. A row (a token and a head) is summed by blocks of 32 keys within spans of 512, counted from the sequence's
// start, in an order that depends on nothing else: not on the rows beside it, how its prompt was cut, or the threads.
//
// A pool is [num_blocks, heads of keys, bytes], as large as OpenVINO's. A block of one head lies in the order in which kernels
// read it; OpenVINO's, a token after the other, would have to be transposed whenever it is read:
//   keys     f32, f16, bf16   [D][32]             8 bits   [D / 4][32][4], scales f32 [32], zero points f32 [32]
//   values   f32, f16, bf16   [32][D]             8 bits   [8][D][4], of keys 4i to 4i + 3, then as for keys
//            4 bits           per 32 values of a head: [8][32][2], scales, zero points
// x = (stored - zero point) * scale, as OpenVINO quantizes: scale = (largest - least) / 255 or 15, zero point = -least / scale.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace forgeline {

class Threads;

enum class Element : int32_t { F32, F16, BF16, U8, U4 };

constexpr int BLOCK = 32;       // keys
constexpr int SPAN = 16 * BLOCK;
constexpr int MAX_HEAD_DIM = 256;

struct AttentionShape {
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;        // a multiple of 16 up to MAX_HEAD_DIM, of 32 where values have 4 bits
    int64_t sliding_window;  // keys a token sees, itself included; 0 = all
    float scale;
    Element keys;
    Element values;

    bool operator==(const AttentionShape& other) const {
        return num_heads == other.num_heads && num_kv_heads == other.num_kv_heads && head_dim == other.head_dim &&
               sliding_window == other.sliding_window && scale == other.scale && keys == other.keys && values == other.values;
    }
    bool supported() const;
    size_t key_bytes() const;  // of a block of one head
    size_t value_bytes() const;
};

struct Sequences {  // of a step, the same in every layer
    const int32_t* past_lens;     // [count]
    const int32_t* begins;        // [count + 1], of their tokens
    const int32_t* blocks;        // of all sequences
    const int32_t* block_begins;  // [count], where theirs start
    int64_t count;
};

struct AttentionTensors {
    const float* q;  // [T, heads * D]
    const float* k;  // [T, heads of keys * D]
    const float* v;
    int64_t q_stride, kv_stride;  // floats from a token to the next
    uint8_t* key_pool;
    uint8_t* value_pool;
    float* out;  // [T, heads * D]
};

// One step's attention, in every layer of this shape: how its rows are divided among the threads is found out once.
class Attention {
public:
    Attention(const AttentionShape& shape, const Sequences& sequences, Threads& threads);
    ~Attention();
    void run(const AttentionTensors& tensors);

private:
    class Plan;
    std::unique_ptr<Plan> m_plan;
};

}  // namespace forgeline
