#include "register/op_def_registry.h"

namespace ops {

class ShortConv : public OpDef {
public:
    explicit ShortConv(const char* name) : OpDef(name)
    {
        // Columns: one combination of types each. Taps are float32 as released, or of x's type.
        const std::vector<ge::DataType> real = {ge::DT_BF16, ge::DT_FLOAT16, ge::DT_FLOAT, ge::DT_BF16, ge::DT_FLOAT16};
        const std::vector<ge::DataType> taps = {ge::DT_FLOAT, ge::DT_FLOAT, ge::DT_FLOAT, ge::DT_BF16, ge::DT_FLOAT16};
        const std::vector<ge::DataType> i32(real.size(), ge::DT_INT32), i64(real.size(), ge::DT_INT64);
        const std::vector<ge::Format> nd(real.size(), ge::FORMAT_ND);
        this->Input("x").ParamType(REQUIRED).DataType(real).Format(nd).AutoContiguous();
        this->Input("weight").ParamType(REQUIRED).DataType(taps).Format(nd).AutoContiguous();
        this->Input("window").ParamType(REQUIRED).DataType(real).Format(nd);
        this->Input("slots").ParamType(REQUIRED).DataType(i32).Format(nd).AutoContiguous();
        this->Input("lengths").ParamType(REQUIRED).DataType(i64).Format(nd).AutoContiguous();
        this->Input("counts").ParamType(REQUIRED).DataType(i64).Format(nd).AutoContiguous();
        this->Output("y").ParamType(REQUIRED).DataType(real).Format(nd);
        this->Output("window").ParamType(REQUIRED).DataType(real).Format(nd);  // the input's buffer
        for (const char* soc : {"ascend910b", "ascend910_93", "ascend950"}) {
            this->AICore().AddConfig(soc);
        }
    }
};

OP_ADD(ShortConv);

}  // namespace ops
