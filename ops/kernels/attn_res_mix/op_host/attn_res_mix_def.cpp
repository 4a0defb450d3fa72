#include "register/op_def_registry.h"

namespace ops {

class AttnResMix : public OpDef {
public:
    explicit AttnResMix(const char* name) : OpDef(name)
    {
        // Columns: one combination of types each. norm, query and gain are float32, or of the sources' type.
        const std::vector<ge::DataType> real = {ge::DT_BF16, ge::DT_FLOAT16, ge::DT_FLOAT, ge::DT_BF16, ge::DT_FLOAT16};
        const std::vector<ge::DataType> aims = {ge::DT_FLOAT, ge::DT_FLOAT, ge::DT_FLOAT, ge::DT_BF16, ge::DT_FLOAT16};
        const std::vector<ge::Format> nd(real.size(), ge::FORMAT_ND);
        this->Input("sources").ParamType(DYNAMIC).DataType(real).Format(nd).AutoContiguous();
        this->Input("norm").ParamType(REQUIRED).DataType(aims).Format(nd).AutoContiguous();
        this->Input("query").ParamType(REQUIRED).DataType(aims).Format(nd).AutoContiguous();
        this->Input("addend").ParamType(OPTIONAL).DataType(real).Format(nd).AutoContiguous();
        this->Input("gain").ParamType(OPTIONAL).DataType(aims).Format(nd).AutoContiguous();
        this->Output("y").ParamType(REQUIRED).DataType(real).Format(nd);
        this->Output("total").ParamType(REQUIRED).DataType(real).Format(nd);  // empty without an addend
        this->Attr("eps").AttrType(REQUIRED).Float();
        this->Attr("norm_eps").AttrType(OPTIONAL).Float(0.0f);
        for (const char* soc : {"ascend910b", "ascend910_93", "ascend950"}) {
            this->AICore().AddConfig(soc);
        }
    }
};

OP_ADD(AttnResMix);

}  // namespace ops
