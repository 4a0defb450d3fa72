// Stand-ins for what the loader uses of CANN's graph engine and runtime: names and signatures as their public documents
// give them, bodies of ours. "Devices" are host memory; what is called is written to the file STAND_IN_LOG names.
//
// A graph's nodes come from STAND_IN_NODES/<graph>.txt, a line `type index [attribute kind value]...` for each: nobody
// reads AIR here. A step adds one to every byte of the states, and each result is filled with the number of its step.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

inline void Log(const std::string& line) {
  std::ofstream(std::getenv("STAND_IN_LOG"), std::ios::app) << line << "\n";
}

inline bool Fails(const std::string& call) {
  const char* wanted = std::getenv("STAND_IN_FAILS");
  return wanted != nullptr && call == wanted;
}

// ---- runtime --------------------------------------------------------------------------------------------------------

using aclError = int;
using aclrtStream = void*;
enum aclrtMemMallocPolicy { ACL_MEM_MALLOC_HUGE_FIRST };
enum aclrtMemcpyKind { ACL_MEMCPY_HOST_TO_HOST, ACL_MEMCPY_HOST_TO_DEVICE, ACL_MEMCPY_DEVICE_TO_HOST };

inline aclError aclInit(const char*) { return Fails("aclInit") ? 1 : 0; }
inline aclError aclFinalize() { Log("aclFinalize"); return 0; }
inline aclError aclrtSetDevice(int32_t device) { Log("device " + std::to_string(device)); return 0; }
inline aclError aclrtResetDevice(int32_t) { return 0; }
inline aclError aclrtCreateStream(aclrtStream* stream) { *stream = stream; return 0; }
inline aclError aclrtDestroyStream(aclrtStream) { return 0; }
inline aclError aclrtSynchronizeStream(aclrtStream) { return 0; }
inline aclError aclrtMalloc(void** data, size_t size, aclrtMemMallocPolicy) {
  *data = std::malloc(size);
  if (*data != nullptr) std::memset(*data, 0xA5, size);  // nothing is zero by itself
  return *data == nullptr;
}
inline aclError aclrtFree(void* data) { std::free(data); return 0; }
inline aclError aclrtMemset(void* data, size_t room, int32_t value, size_t size) {
  return size > room ? 1 : (std::memset(data, value, size), 0);
}
inline aclError aclrtMemcpy(void* to, size_t room, const void* from, size_t size, aclrtMemcpyKind) {
  return size > room ? 1 : (std::memcpy(to, from, size), 0);
}

// ---- graphs ---------------------------------------------------------------------------------------------------------

namespace ge {

using Status = uint32_t;
using graphStatus = uint32_t;
constexpr graphStatus GRAPH_SUCCESS = 0;
enum Format { FORMAT_ND = 2, FORMAT_FRACTAL_NZ = 29 };
enum DataType { DT_FLOAT = 0, DT_BF16 = 27 };
enum Placement { kPlacementHost, kPlacementDevice };

class AscendString {
 public:
  AscendString() = default;
  AscendString(const char* text) : text_(text) {}
  const char* GetString() const { return text_.c_str(); }
  bool operator<(const AscendString& other) const { return text_ < other.text_; }

 private:
  std::string text_;
};

class Shape {
 public:
  Shape() = default;
  explicit Shape(const std::vector<int64_t>& dims) : dims_(dims) {}
  std::vector<int64_t> GetDims() const { return dims_; }

 private:
  std::vector<int64_t> dims_;
};

class TensorDesc {
 public:
  TensorDesc() = default;
  explicit TensorDesc(Shape shape, Format format = FORMAT_ND, DataType dtype = DT_FLOAT)
      : shape_(shape), format_(format), dtype_(dtype) {}
  Shape GetShape() const { return shape_; }
  Format GetFormat() const { return format_; }
  DataType GetDataType() const { return dtype_; }
  void SetOriginShape(const Shape& shape) { origin_ = shape; }
  void SetOriginFormat(Format) {}
  void SetPlacement(Placement placement) { placement_ = placement; }
  Placement GetPlacement() const { return placement_; }

 private:
  Shape shape_, origin_;
  Format format_ = FORMAT_ND;
  DataType dtype_ = DT_FLOAT;
  Placement placement_ = kPlacementHost;
};

class Tensor {
 public:
  using DeleteFunc = std::function<void(uint8_t*)>;
  explicit Tensor(const TensorDesc& desc) : desc_(desc) {}
  TensorDesc GetTensorDesc() const { return desc_; }
  graphStatus SetData(uint8_t* data, size_t size, const DeleteFunc&) { data_ = data; size_ = size; return 0; }
  uint8_t* GetData() const { return data_; }
  size_t GetSize() const { return size_; }

 private:
  TensorDesc desc_;
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

struct Node {
  std::string type;
  int64_t index = -1;
  std::map<std::string, int64_t> numbers;
  std::map<std::string, std::string> texts;
};

class GNode {
 public:
  explicit GNode(std::shared_ptr<Node> node) : node_(std::move(node)) {}
  graphStatus GetType(AscendString& type) const { type = node_->type.c_str(); return 0; }
  graphStatus GetAttr(const AscendString& name, AscendString& value) const {
    auto found = node_->texts.find(name.GetString());
    if (found == node_->texts.end()) return 1;
    value = found->second.c_str();
    return 0;
  }
  graphStatus SetAttr(const AscendString& name, int64_t& value) const { return Set(node_->numbers, name, value); }
  graphStatus SetAttr(const AscendString& name, AscendString& value) const {
    return Set(node_->texts, name, std::string(value.GetString()));
  }

 private:
  template <typename Values, typename Value>
  static graphStatus Set(Values& values, const AscendString& name, Value value) {
    if (values.count(name.GetString()) == 0) return 1;
    values[name.GetString()] = value;
    return 0;
  }
  std::shared_ptr<Node> node_;
};

class Graph {
 public:
  Graph() = default;
  explicit Graph(const char* name) : name_(name) {}
  graphStatus LoadFromFile(const char* file) {
    Log("load " + std::string(file));
    if (!std::ifstream(file)) return 1;
    std::ifstream in(std::string(std::getenv("STAND_IN_NODES")) + "/" + name_ + ".txt");
    for (std::string line; std::getline(in, line);) {
      std::istringstream text(line);
      auto node = std::make_shared<Node>();
      text >> node->type >> node->index;
      for (std::string name, kind, value; text >> name >> kind >> value;)
        if (kind == "i") node->numbers[name] = std::stoll(value);
        else node->texts[name] = value;
      nodes_.push_back(node);
    }
    return 0;
  }
  std::vector<GNode> GetAllNodes() const {
    std::vector<GNode> found;
    for (const auto& node : nodes_) found.emplace_back(node);
    return found;
  }

  std::string name_;
  std::vector<std::shared_ptr<Node>> nodes_;
};

// ---- sessions -------------------------------------------------------------------------------------------------------

inline AscendString GEGetErrorMsgV2() { return "E00000: the stand-in was told to fail"; }

inline Status GEInitialize(const std::map<AscendString, AscendString>& options) {
  for (const auto& [key, value] : options) Log(std::string("option ") + key.GetString() + " " + value.GetString());
  return Fails("GEInitialize") ? 7 : 0;
}

inline Status GEFinalize() { Log("GEFinalize"); return 0; }

class Session {
 public:
  explicit Session(const std::map<AscendString, AscendString>&) {}

  Status AddGraph(uint32_t id, const Graph& graph) {
    graphs_[id] = graph;
    for (const auto& node : graph.nodes_) {
      for (const auto& [name, value] : node->numbers) Log("node " + node->type + " " + name + " " + std::to_string(value));
      for (const auto& [name, value] : node->texts) Log("node " + node->type + " " + name + " " + value);
    }
    return 0;
  }

  Status CompileGraph(uint32_t id) {
    Log("compile " + graphs_[id].name_);
    return Fails("CompileGraph") ? 8 : 0;
  }

  Status RunGraphWithStreamAsync(uint32_t id, void*, const std::vector<Tensor>& inputs, std::vector<Tensor>& outputs) {
    Log("run " + graphs_[id].name_);
    for (size_t i = 0; i < inputs.size(); ++i) {
      const TensorDesc desc = inputs[i].GetTensorDesc();
      if (desc.GetPlacement() != kPlacementDevice) return 9;
      uint32_t low = 1, high = 0;  // Adler-32 of the bytes
      for (size_t n = 0; n < inputs[i].GetSize(); ++n) {
        low = (low + inputs[i].GetData()[n]) % 65521;
        high = (high + low) % 65521;
      }
      const uint32_t sum = high << 16 | low;
      std::string line = "in " + std::to_string(i) + " " + std::to_string(desc.GetDataType()) + " " +
                         std::to_string(desc.GetFormat()) + " " + std::to_string(inputs[i].GetSize()) + " " +
                         std::to_string(sum);
      for (int64_t dim : desc.GetShape().GetDims()) line += " " + std::to_string(dim);
      Log(line);
    }
    for (const auto& node : graphs_[id].nodes_)
      if (node->type == "RefData") {
        const Tensor& state = inputs.at(static_cast<size_t>(node->index));
        for (size_t n = 0; n < state.GetSize(); ++n) ++state.GetData()[n];
      }
    ++steps_;
    for (const Tensor& output : outputs) std::memset(output.GetData(), steps_, output.GetSize());
    return 0;
  }

 private:
  std::map<uint32_t, Graph> graphs_;
  int steps_ = 0;
};

}  // namespace ge
