// forgeline::PagedAttention as an operation of OpenVINO. The CPU plug-in runs operations it does not know through `evaluate`, in
// the arena of its stream, on tensors that are its own memory; pools are the memory that the request was given, and are written.
//
// Inputs   q f32 [T, heads * D], k, v f32 [T, heads of keys * D], key pool, value pool u8 [num_blocks, heads of keys, 32, bytes]
//          past_lens [B], subsequence_begins [B + 1], block_indices [N], block_indices_begins [B, or more] int32
//          further ones are ignored
// Output   f32 [T, heads * D]

#include <openvino/core/except.hpp>
#include <openvino/core/extension.hpp>
#include <openvino/core/op_extension.hpp>
#include <openvino/op/op.hpp>

#include "../../quantized_matmul/threads.h"
#include "attention.h"

namespace forgeline {

Element element_of(const std::string& name) {
    static const char* const NAMES[] = {"f32", "f16", "bf16", "u8", "u4"};
    for (int32_t i = 0; i < 5; ++i)
        if (name == NAMES[i]) return Element(i);
    OPENVINO_THROW("forgeline's attention stores f32, f16, bf16, u8 and u4, not ", name);
}

class PagedAttention : public ov::op::Op {
public:
    OPENVINO_OP("PagedAttention", "forgeline");

    PagedAttention() = default;

    void validate_and_infer_types() override {
        m_shape.keys = element_of(m_keys);
        m_shape.values = element_of(m_values);
        m_shape.num_heads = m_shape.num_kv_heads;  // until a step tells
        OPENVINO_ASSERT(m_shape.supported(), "forgeline::PagedAttention: no kernels for ", m_shape.num_kv_heads, " heads of ",
                        m_shape.head_dim, " stored as ", m_keys, ":", m_values);
        set_output_type(0, ov::element::f32, get_input_partial_shape(0));
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        auto clone = std::make_shared<PagedAttention>();
        clone->set_arguments(inputs);
        clone->m_shape = m_shape;
        clone->m_keys = m_keys;
        clone->m_values = m_values;
        clone->validate_and_infer_types();
        return clone;
    }

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("scale", m_shape.scale);
        visitor.on_attribute("sliding_window", m_shape.sliding_window);
        visitor.on_attribute("num_kv_heads", m_shape.num_kv_heads);
        visitor.on_attribute("head_dim", m_shape.head_dim);
        visitor.on_attribute("key_type", m_keys);
        visitor.on_attribute("value_type", m_values);
        return true;
    }

    bool has_evaluate() const override { return true; }

    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        AttentionShape shape = m_shape;
        shape.num_heads = int64_t(inputs[0].get_shape()[1]) / shape.head_dim;
        const auto pool = [&](int i) { return const_cast<uint8_t*>(inputs[i].data<const uint8_t>()); };
        const auto ints = [&](int i) { return inputs[i].data<const int32_t>(); };
        const auto floats = [&](int i) { return inputs[i].data<const float>(); };
        Arena threads;
        Attention(shape, {ints(5), ints(6), ints(7), ints(8), int64_t(inputs[5].get_size())}, threads)
            .run({floats(0), floats(1), floats(2), shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim, pool(3),
                  pool(4), outputs[0].data<float>()});
        return true;
    }

private:
    AttentionShape m_shape{};
    std::string m_keys = "f32";
    std::string m_values = "f32";
};

void add_attention_extension(std::vector<ov::Extension::Ptr>& extensions) {
    extensions.push_back(std::make_shared<ov::OpExtension<PagedAttention>>());
}

}  // namespace forgeline

extern "C" __attribute__((visibility("default"))) void forgeline_attend(const forgeline::AttentionShape* shape,
                                                                        const forgeline::Sequences* sequences,
                                                                        const forgeline::AttentionTensors* tensors) {
    forgeline::Arena threads;
    forgeline::Attention(*shape, *sequences, threads).run(*tensors);
}
