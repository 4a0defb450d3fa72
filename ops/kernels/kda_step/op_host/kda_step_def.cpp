#include "register/op_def_registry.h"

namespace ops {

class KdaStep : public OpDef {
public:
    explicit KdaStep(const char* name) : OpDef(name)
    {
        // Columns: one combination of types each. decay and beta are float32 where they are made before.
        const std::vector<ge::DataType> real = {ge::DT_BF16, ge::DT_FLOAT16, ge::DT_FLOAT, ge::DT_BF16, ge::DT_FLOAT16};
        const std::vector<ge::DataType> gate = {ge::DT_FLOAT, ge::DT_FLOAT, ge::DT_FLOAT, ge::DT_BF16, ge::DT_FLOAT16};
        const std::vector<ge::DataType> f32(real.size(), ge::DT_FLOAT), i32(real.size(), ge::DT_INT32);
        const std::vector<ge::Format> nd(real.size(), ge::FORMAT_ND);
        for (const char* input : {"q", "k", "v"}) {
            this->Input(input).ParamType(REQUIRED).DataType(real).Format(nd).AutoContiguous();
        }
        for (const char* input : {"decay", "beta"}) {
            this->Input(input).ParamType(REQUIRED).DataType(gate).Format(nd).AutoContiguous();
        }
        this->Input("memory").ParamType(REQUIRED).DataType(f32).Format(nd);
        this->Input("slots").ParamType(REQUIRED).DataType(i32).Format(nd).AutoContiguous();
        for (const char* input : {"bias", "log_rate"}) {
            this->Input(input).ParamType(OPTIONAL).DataType(f32).Format(nd).AutoContiguous();
        }
        this->Output("o").ParamType(REQUIRED).DataType(real).Format(nd);
        this->Output("memory").ParamType(REQUIRED).DataType(f32).Format(nd);  // the input's buffer
        this->Attr("scale").AttrType(REQUIRED).Float();
        this->Attr("norm_eps").AttrType(OPTIONAL).Float(-1.0f);     // negative: q and k have unit length
        this->Attr("beta_logits").AttrType(OPTIONAL).Bool(false);   // beta is before its sigmoid
        this->Attr("lower_bound").AttrType(OPTIONAL).Float(0.0f);   // of the gate; 0: none, -rate * softplus
        for (const char* soc : {"ascend910b", "ascend910_93", "ascend950"}) {
            this->AICore().AddConfig(soc);
        }
    }
};

OP_ADD(KdaStep);

}  // namespace ops
