#include "register/op_def_registry.h"

namespace ops {

class ResidualNormGate : public OpDef {
public:
    explicit ResidualNormGate(const char* name) : OpDef(name)
    {
        // Columns: one combination of types each. The weight is float32, or of x's type.
        const std::vector<ge::DataType> real = {ge::DT_BF16, ge::DT_FLOAT16, ge::DT_FLOAT, ge::DT_BF16, ge::DT_FLOAT16};
        const std::vector<ge::DataType> gain = {ge::DT_FLOAT, ge::DT_FLOAT, ge::DT_FLOAT, ge::DT_BF16, ge::DT_FLOAT16};
        const std::vector<ge::Format> nd(real.size(), ge::FORMAT_ND);
        this->Input("x").ParamType(REQUIRED).DataType(real).Format(nd).AutoContiguous();
        this->Input("residual").ParamType(OPTIONAL).DataType(real).Format(nd).AutoContiguous();
        this->Input("weight").ParamType(OPTIONAL).DataType(gain).Format(nd).AutoContiguous();
        this->Input("gate").ParamType(OPTIONAL).DataType(real).Format(nd).AutoContiguous();
        this->Output("y").ParamType(REQUIRED).DataType(real).Format(nd);
        this->Output("sum").ParamType(REQUIRED).DataType(real).Format(nd);  // empty without a residual
        this->Attr("eps").AttrType(OPTIONAL).Float(0.0f);
        for (const char* soc : {"ascend910b", "ascend910_93", "ascend950"}) {
            this->AICore().AddConfig(soc);
        }
    }
};

OP_ADD(ResidualNormGate);

}  // namespace ops
