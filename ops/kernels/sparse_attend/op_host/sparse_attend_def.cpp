#include "register/op_def_registry.h"

namespace ops {

class SparseAttend : public OpDef {
public:
    explicit SparseAttend(const char* name) : OpDef(name)
    {
        const std::vector<ge::DataType> real = {ge::DT_BF16, ge::DT_FLOAT16};
        const std::vector<ge::DataType> f32(real.size(), ge::DT_FLOAT), i32(real.size(), ge::DT_INT32);
        const std::vector<ge::DataType> i64(real.size(), ge::DT_INT64);
        const std::vector<ge::Format> nd(real.size(), ge::FORMAT_ND);
        for (const char* input : {"q", "q_rope"}) {
            this->Input(input).ParamType(REQUIRED).DataType(real).Format(nd).AutoContiguous();
        }
        for (const char* input : {"latent", "rope"}) {  // the caches: never copied
            this->Input(input).ParamType(REQUIRED).DataType(real).Format(nd);
        }
        for (const char* input : {"selected", "block_table"}) {
            this->Input(input).ParamType(REQUIRED).DataType(i32).Format(nd).AutoContiguous();
        }
        for (const char* input : {"lengths", "counts"}) {
            this->Input(input).ParamType(REQUIRED).DataType(i64).Format(nd).AutoContiguous();
        }
        this->Output("o").ParamType(REQUIRED).DataType(real).Format(nd);
        this->Output("lse").ParamType(REQUIRED).DataType(f32).Format(nd);
        this->Attr("scale").AttrType(REQUIRED).Float();
        for (const char* soc : {"ascend910b", "ascend910_93", "ascend950"}) {
            this->AICore().AddConfig(soc);
        }
    }
};

OP_ADD(SparseAttend);

}  // namespace ops
