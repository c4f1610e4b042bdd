// forgeline::DecoderLayers as an operation of OpenVINO. The CPU plug-in runs operations it does not know through `evaluate`, in the
// arena of its stream, on tensors that are its own memory; pools are the memory that the request was given, and are written.
//
// Inputs   x f32 [1, T, hidden], cos, sin f32 [1, T, D / 2]
//          past_lens [B], subsequence_begins [B + 1], block_indices [N], block_indices_begins [B, or more] int32
//          packed u8 [bytes]: the matrices of a layer after the other, each on a cache line (kernels.h)
//          floats f32: of each layer the norms of its matrices that have one, the bias, the norms of heads of q and of k
//          key pool, value pool u8 [num_blocks, heads of keys, 32, bytes], of each layer
//          rows int32, if `picks`
// Output   f32 [1, T, hidden], or [1, rows, hidden]

#include <utility>

#include <openvino/core/except.hpp>
#include <openvino/core/extension.hpp>
#include <openvino/core/op_extension.hpp>
#include <openvino/op/op.hpp>

#include "../quantized_matmul/threads.h"
#include "layers.h"

namespace forgeline {

Element element_of(const std::string& name);  // attention_op.cpp

namespace {

constexpr size_t MATRICES = 4;       // of a layer: q, k and v; output; gate and up; down
constexpr size_t MATRIX_VALUES = 8;  // outputs, width, bits, group, input_group, zero_points, gated, normed
constexpr size_t LAYER_VALUES = 6;   // num_heads, num_kv_heads, head_dim, sliding_window, biased, heads_normed
constexpr size_t LINE = 64;
enum Input { X, COS, SIN, PAST_LENS, BEGINS, BLOCKS, BLOCK_BEGINS, PACKED, FLOATS, POOLS };

}  // namespace

class DecoderLayers : public ov::op::Op {
public:
    OPENVINO_OP("DecoderLayers", "forgeline");

    DecoderLayers() = default;

    void validate_and_infer_types() override {
        const size_t layers = m_layers.size() / LAYER_VALUES;
        OPENVINO_ASSERT(m_matrices.size() == layers * MATRICES * MATRIX_VALUES && m_epsilons.size() == layers * MATRICES &&
                            m_head_epsilons.size() == layers && m_scales.size() == layers && get_input_size() == POOLS + 2 * layers + m_picks,
                        "forgeline::DecoderLayers: ", layers, " layers, but not as many of all that belongs to one");
        for (size_t i = 0; i < layers; ++i)
            OPENVINO_ASSERT(attention(i).supported(), "forgeline::DecoderLayers: no kernels for this attention");
        ov::PartialShape out = get_input_partial_shape(X);
        if (m_picks) out[1] = get_input_partial_shape(get_input_size() - 1)[0];
        set_output_type(0, ov::element::f32, out);
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        auto clone = std::make_shared<DecoderLayers>();
        clone->set_arguments(inputs);
        clone->m_matrices = m_matrices;
        clone->m_epsilons = m_epsilons;
        clone->m_head_epsilons = m_head_epsilons;
        clone->m_layers = m_layers;
        clone->m_scales = m_scales;
        clone->m_keys = m_keys;
        clone->m_values = m_values;
        clone->m_picks = m_picks;
        clone->validate_and_infer_types();
        return clone;
    }

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("matrices", m_matrices);
        visitor.on_attribute("epsilons", m_epsilons);
        visitor.on_attribute("head_epsilons", m_head_epsilons);
        visitor.on_attribute("layers", m_layers);
        visitor.on_attribute("scales", m_scales);
        visitor.on_attribute("key_type", m_keys);
        visitor.on_attribute("value_type", m_values);
        visitor.on_attribute("picks", m_picks);
        return true;
    }

    bool has_evaluate() const override { return true; }

    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        const auto ints = [&](size_t i) { return inputs[i].data<const int32_t>(); };
        const auto floats = [&](size_t i) { return inputs[i].data<const float>(); };
        const auto pool = [&](size_t i) { return const_cast<uint8_t*>(inputs[i].data<const uint8_t>()); };
        const uint8_t* packed = inputs[PACKED].data<const uint8_t>();
        const float* numbers = floats(FLOATS);
        std::vector<DecoderLayer> layers(m_scales.size());
        for (size_t i = 0; i < layers.size(); ++i) {
            DecoderLayer& layer = layers[i];
            const int64_t* of = &m_matrices[i * MATRICES * MATRIX_VALUES];
            const float* epsilon = &m_epsilons[i * MATRICES];
            for (Matrix* matrix : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) {
                matrix->shape = {of[0], of[1], int32_t(of[2]), int32_t(of[3]), int32_t(of[4]), of[5] != 0, *epsilon++, of[6] != 0};
                matrix->packed = packed;
                matrix->norm = of[7] ? numbers : nullptr;
                packed += (matrix->shape.packed_bytes() + LINE - 1) / LINE * LINE;
                if (of[7]) numbers += of[1];
                of += MATRIX_VALUES;
            }
            layer.attention = attention(i);
            const auto taken = [&](bool exists, int64_t count) { return exists ? std::exchange(numbers, numbers + count) : nullptr; };
            const bool biased = m_layers[i * LAYER_VALUES + 4], normed = m_layers[i * LAYER_VALUES + 5];
            layer.bias = taken(biased, layer.qkv.shape.outputs);
            layer.q_norm = taken(normed, layer.attention.head_dim);
            layer.k_norm = taken(normed, layer.attention.head_dim);
            layer.head_epsilon = m_head_epsilons[i];
            layer.key_pool = pool(POOLS + 2 * i);
            layer.value_pool = pool(POOLS + 2 * i + 1);
        }
        const ov::Tensor& rows = inputs.back();
        Team threads;
        run_layers(layers,
                   {floats(X), floats(COS), floats(SIN), int64_t(inputs[X].get_shape()[1]),
                    {ints(PAST_LENS), ints(BEGINS), ints(BLOCKS), ints(BLOCK_BEGINS), int64_t(inputs[PAST_LENS].get_size())},
                    m_picks ? rows.data<const int32_t>() : nullptr, m_picks ? int64_t(rows.get_size()) : 0,
                    outputs[0].data<float>()},
                   threads);
        return true;
    }

private:
    AttentionShape attention(size_t layer) const {
        const int64_t* of = &m_layers[layer * LAYER_VALUES];
        return {of[0], of[1], of[2], of[3], m_scales[layer], element_of(m_keys), element_of(m_values)};
    }

    std::vector<int64_t> m_matrices;
    std::vector<float> m_epsilons;
    std::vector<float> m_head_epsilons;
    std::vector<int64_t> m_layers;
    std::vector<float> m_scales;
    std::string m_keys = "f32";
    std::string m_values = "f32";
    bool m_picks = false;
};

void add_layers_extension(std::vector<ov::Extension::Ptr>& extensions) {
    extensions.push_back(std::make_shared<ov::OpExtension<DecoderLayers>>());
}

}  // namespace forgeline
