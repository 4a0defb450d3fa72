#pragma once

#include "kernel_operator.h"

namespace AscendC {

// The tensors of a dynamic input: the address that the kernel is given holds their number and addresses.
class ListTensorDesc {
public:
    ListTensorDesc() = default;
    ListTensorDesc(void* data, uint32_t = UINT32_MAX, uint32_t = UINT32_MAX) { Init(data); }
    void Init(void* data, uint32_t = UINT32_MAX, uint32_t = UINT32_MAX) { list = static_cast<uint64_t*>(data); }

    uint32_t GetSize() { return uint32_t(list[0]); }

    template <typename T>
    T* GetDataPtr(uint32_t index)
    {
        if (index >= list[0]) twin::Refuse("GetDataPtr: tensor %u of a list of %u", index, uint32_t(list[0]));
        return reinterpret_cast<T*>(list[1 + index]);
    }

private:
    uint64_t* list = nullptr;
};

}  // namespace AscendC
