#include "register/op_def_registry.h"

namespace ops {

class SituMul : public OpDef {
public:
    explicit SituMul(const char* name) : OpDef(name)
    {
        const std::vector<ge::DataType> real = {ge::DT_BF16, ge::DT_FLOAT16, ge::DT_FLOAT};
        const std::vector<ge::Format> nd(real.size(), ge::FORMAT_ND);
        this->Input("gate").ParamType(REQUIRED).DataType(real).Format(nd).AutoContiguous();
        this->Input("up").ParamType(REQUIRED).DataType(real).Format(nd).AutoContiguous();
        this->Output("y").ParamType(REQUIRED).DataType(real).Format(nd);
        this->Attr("beta").AttrType(REQUIRED).Float();
        this->Attr("linear_beta").AttrType(REQUIRED).Float();
        for (const char* soc : {"ascend910b", "ascend910_93", "ascend950"}) {
            this->AICore().AddConfig(soc);
        }
    }
};

OP_ADD(SituMul);

}  // namespace ops
