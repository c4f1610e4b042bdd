// forgeline::QuantizedMatMul as an operation of OpenVINO. The CPU plug-in runs operations it does not know through `evaluate`, in the
// arena of its stream, on tensors that are its own memory.
//
// Inputs   x f32 [..., width], packed u8 [bytes] (kernels.h), norm f32 [width] if `normed`, residual f32 (shape of the output) if
//          `added`
// Output   f32 [..., outputs, or half of them when gated]

#include <openvino/core/extension.hpp>
#include <openvino/core/op_extension.hpp>
#include <openvino/op/op.hpp>

#include "kernels.h"
#include "threads.h"

namespace forgeline {

class QuantizedMatMul : public ov::op::Op {
public:
    OPENVINO_OP("QuantizedMatMul", "forgeline");

    QuantizedMatMul() = default;
    QuantizedMatMul(const ov::OutputVector& inputs, const Shape& shape, bool normed, bool added)
        : Op(inputs), m_shape(shape), m_normed(normed), m_added(added) {
        constructor_validate_and_infer_types();
    }

    void validate_and_infer_types() override {
        ov::PartialShape out = get_input_partial_shape(0);
        out[out.rank().get_length() - 1] = m_shape.gated ? m_shape.outputs / 2 : m_shape.outputs;
        set_output_type(0, ov::element::f32, out);
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        return std::make_shared<QuantizedMatMul>(inputs, m_shape, m_normed, m_added);
    }

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("outputs", m_shape.outputs);
        visitor.on_attribute("width", m_shape.width);
        visitor.on_attribute("bits", m_shape.bits);
        visitor.on_attribute("group", m_shape.group);
        visitor.on_attribute("input_group", m_shape.input_group);
        visitor.on_attribute("zero_points", m_shape.zero_points);
        visitor.on_attribute("epsilon", m_shape.epsilon);
        visitor.on_attribute("gated", m_shape.gated);
        visitor.on_attribute("normed", m_normed);
        visitor.on_attribute("added", m_added);
        return true;
    }

    bool has_evaluate() const override { return true; }

    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        const auto rows = int64_t(inputs[0].get_size()) / m_shape.width;
        const float* norm = m_normed ? inputs[2].data<const float>() : nullptr;
        const float* residual = m_added ? inputs[m_normed ? 3 : 2].data<const float>() : nullptr;
        Arena threads;
        multiply(m_shape, static_cast<const uint8_t*>(inputs[1].data()), inputs[0].data<const float>(), norm, residual, rows,
                 outputs[0].data<float>(), threads);
        return true;
    }

private:
    Shape m_shape{};
    bool m_normed = false, m_added = false;
};

}  // namespace forgeline

namespace forgeline {

void add_attention_extension(std::vector<ov::Extension::Ptr>& extensions);  // attention_op.cpp
void add_layers_extension(std::vector<ov::Extension::Ptr>& extensions);     // layers_op.cpp

static std::vector<ov::Extension::Ptr> extensions() {
    std::vector<ov::Extension::Ptr> all{std::make_shared<ov::OpExtension<QuantizedMatMul>>()};
    add_attention_extension(all);
    add_layers_extension(all);
    return all;
}

}  // namespace forgeline

OPENVINO_CREATE_EXTENSIONS(forgeline::extensions())

#define EXPORT __attribute__((visibility("default")))

extern "C" {

EXPORT size_t forgeline_packed_bytes(const forgeline::Shape* shape) { return shape->packed_bytes(); }

EXPORT void forgeline_pack(const forgeline::Shape* shape, const uint8_t* weights, const float* scales, const uint8_t* zero_points,
                           int64_t scales_per_row, uint8_t* packed) {
    forgeline::pack(*shape, weights, scales, zero_points, scales_per_row, packed);
}

EXPORT void forgeline_multiply(const forgeline::Shape* shape, const uint8_t* packed, const float* x, const float* norm,
                               const float* residual, int64_t rows, float* y) {
    forgeline::Arena threads;
    forgeline::multiply(*shape, packed, x, norm, residual, rows, y, threads);
}

}
