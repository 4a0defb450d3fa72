#include "register/op_def_registry.h"

namespace ops {

class SituMulQuant : public OpDef {
public:
    explicit SituMulQuant(const char* name) : OpDef(name)
    {
        const std::vector<ge::DataType> real = {ge::DT_BF16, ge::DT_FLOAT16, ge::DT_FLOAT};
        const std::vector<ge::DataType> i8(real.size(), ge::DT_INT8), f32(real.size(), ge::DT_FLOAT);
        const std::vector<ge::Format> nd(real.size(), ge::FORMAT_ND);
        this->Input("gate").ParamType(REQUIRED).DataType(real).Format(nd).AutoContiguous();
        this->Input("up").ParamType(REQUIRED).DataType(real).Format(nd).AutoContiguous();
        this->Output("y").ParamType(REQUIRED).DataType(i8).Format(nd);
        this->Output("scale").ParamType(REQUIRED).DataType(f32).Format(nd);
        this->Attr("beta").AttrType(REQUIRED).Float();
        this->Attr("linear_beta").AttrType(REQUIRED).Float();
        for (const char* soc : {"ascend910b", "ascend910_93", "ascend950"}) {
            this->AICore().AddConfig(soc);
        }
    }
};

OP_ADD(SituMulQuant);

}  // namespace ops
