// Runs one rank of a kimi-graph bundle through GE's session interface: for bring-up, not for serving.
//
// NOT RUN ON A DEVICE. Written by the public documents and headers of CANN's graph engine and runtime (9.x); its tests
// compile it against declarations of their own and run it with stand-ins.
//
//   kimi_graph_loader --bundle DIR --deploy DIR --rank R --weights DIR [--compile-only | --steps DIR --out DIR]
//                     [--deterministic] [--states]
//
// DEPLOY/ranks/R.txt and DEPLOY/graphs/*.txt say what the rank is and what its graphs read, in lines of words;
// DEPLOY/weights/R.txt has `name file offset bytes sha256` for each weight, of files in WEIGHTS. STEPS/<n>/phase names the
// phase of a step, STEPS/<n>/rankR/<input>.bin are its inputs, OUT/<n>/rankR/<name>.bin its results. What a stage reads
// of an earlier one is waited for there: OUT is a folder that all hosts see. STEPS/<n>/rankR/<state>.bin, if there is
// one, is what a state starts the step with; with --states OUT has them after it.
// What the bundle's manifest does not allow is refused before a graph sees it, with the key that says so: another
// phase, an input of another size, a sequence that is too long, a slot or page that is not there.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "acl/acl.h"
#include "ge/ge_api.h"
#include "graph/gnode.h"
#include "graph/graph.h"
#include "graph/tensor.h"
#include "sha256.h"

namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;
using Dims = std::vector<int64_t>;

constexpr size_t kBlock = size_t{64} << 20;  // bytes that are read of a file at a time
constexpr int64_t kInt32 = 3;                // of ge::DataType
constexpr int kWaitSeconds = 1800;           // for what another stage gives

[[noreturn]] void Fail(const std::string& what) { throw std::runtime_error(what); }

void CheckGe(uint32_t status, const std::string& what) {
  if (status != 0)
    Fail(what + ": GE's status is " + std::to_string(status) + ": " + ge::GEGetErrorMsgV2().GetString());
}

void CheckAcl(aclError status, const std::string& what) {
  if (status != 0) Fail(what + ": the runtime's status is " + std::to_string(status));
}

// ---- files of words -------------------------------------------------------------------------------------------------

std::vector<Words> ReadLines(const fs::path& file) {
  std::ifstream in(file);
  if (!in) Fail(file.string() + ": cannot be read");
  std::vector<Words> lines;
  for (std::string line; std::getline(in, line);) {
    std::istringstream text(line);
    Words words;
    for (std::string word; text >> word;) words.push_back(word);
    if (!words.empty()) lines.push_back(words);
  }
  return lines;
}

const std::string& Word(const Words& line, size_t at, const fs::path& file) {
  if (at >= line.size()) Fail(file.string() + ": line '" + line[0] + "' has too few words");
  return line[at];
}

int64_t Number(const std::string& text, const fs::path& file) {
  size_t used = 0;
  int64_t value = 0;
  try {
    value = std::stoll(text, &used);
  } catch (const std::exception&) {
    used = 0;
  }
  if (used == 0 || used != text.size()) Fail(file.string() + ": '" + text + "' is no number");
  return value;
}

Dims ReadDims(const std::string& text, const fs::path& file) {
  Dims dims;
  std::istringstream in(text == "-" ? "" : text);
  for (std::string part; std::getline(in, part, ',');) dims.push_back(Number(part, file));
  return dims;
}

// An input, weight, state or result of a graph.
struct Port {
  std::string kind, name;
  int64_t index = 0, dtype = 0, format = 0;
  size_t bytes = 0;
  Dims dims, origin;
};

// The largest number that an input may hold, and the manifest's key that says so.
struct Most {
  int64_t value = 0;
  std::string key;
};

struct GraphPlan {
  std::string name, phase, file;
  std::map<std::string, Most> most;                                        // by input
  std::map<std::string, std::string> communicators;                        // attribute by operator type
  std::map<std::string, std::pair<std::string, std::string>> places;      // attribute and group by operator type
  std::map<std::string, int64_t> reads;                                    // how many stages before it is given
  std::vector<Port> inputs, outputs;                                       // by index

  static GraphPlan Read(const fs::path& file) {
    GraphPlan plan;
    for (const Words& line : ReadLines(file)) {
      const std::string& key = line[0];
      if (key == "graph") plan.name = Word(line, 1, file);
      else if (key == "phase") plan.phase = Word(line, 1, file);
      else if (key == "file") plan.file = Word(line, 1, file);
      else if (key == "communicator") plan.communicators[Word(line, 1, file)] = Word(line, 2, file);
      else if (key == "most") plan.most[Word(line, 1, file)] = {Number(Word(line, 2, file), file), Word(line, 3, file)};
      else if (key == "read") plan.reads[Word(line, 1, file)] = Number(Word(line, 2, file), file);
      else if (key == "place") plan.places[Word(line, 1, file)] = {Word(line, 2, file), Word(line, 3, file)};
      else (key == "output" ? plan.outputs : plan.inputs).push_back(ReadPort(line, file));
    }
    for (auto* ports : {&plan.inputs, &plan.outputs})
      for (size_t i = 0; i < ports->size(); ++i)
        if ((*ports)[i].index != static_cast<int64_t>(i)) Fail(file.string() + ": indices do not count up from 0");
    return plan;
  }

  static Port ReadPort(const Words& line, const fs::path& file) {
    static const std::set<std::string> kinds = {"input", "weight", "state", "output"};
    if (kinds.count(line[0]) == 0) Fail(file.string() + ": line '" + line[0] + "' is not known");
    Port port;
    port.kind = line[0];
    port.index = Number(Word(line, 1, file), file);
    port.name = Word(line, 2, file);
    port.dtype = Number(Word(line, 3, file), file);
    port.format = Number(Word(line, 4, file), file);
    port.bytes = static_cast<size_t>(Number(Word(line, 5, file), file));
    port.dims = ReadDims(Word(line, 6, file), file);
    port.origin = ReadDims(Word(line, 7, file), file);
    return port;
  }
};

struct Group {
  std::string graph_name, name, ranks;
};

struct RankPlan {
  int64_t rank = -1, ranks = 0, stride = 0, device = 0;  // stride: ranks of a stage
  std::map<std::string, std::string> options;
  std::vector<Group> groups;  // in the order in which every rank makes them
  std::map<std::string, int64_t> at, own;
  std::set<std::string> phases;  // of the bundle: this rank may have no graph of one
  std::vector<std::string> graphs;

  static RankPlan Read(const fs::path& file) {
    RankPlan plan;
    for (const Words& line : ReadLines(file)) {
      const std::string& key = line[0];
      const std::string& first = Word(line, 1, file);
      if (key == "rank") plan.rank = Number(first, file);
      else if (key == "ranks") plan.ranks = Number(first, file);
      else if (key == "stride") plan.stride = Number(first, file);
      else if (key == "device") plan.device = Number(first, file);
      else if (key == "option") plan.options[first] = Word(line, 2, file);
      else if (key == "group") plan.groups.push_back({first, Word(line, 2, file), Word(line, 3, file)});
      else if (key == "at") plan.at[first] = Number(Word(line, 2, file), file);
      else if (key == "own") plan.own[first] = Number(Word(line, 2, file), file);
      else if (key == "phase") plan.phases.insert(first);
      else if (key == "run") plan.graphs.push_back(first);
      else Fail(file.string() + ": line '" + key + "' is not known");
    }
    return plan;
  }

  // ge.exec.hcomGrouplist: GE's adaptor makes each group that the rank is in, in this order.
  std::string GroupList() const {
    std::string text = "[";
    for (const Group& g : groups)
      text += (text.size() > 1 ? "," : "") + std::string("{\"group_name\":\"") + g.name +
              "\",\"group_rank_list\":[" + g.ranks + "]}";
    return text + "]";
  }

  const std::string& Communicator(const std::string& graph_name) const {
    for (const Group& g : groups)
      if (g.graph_name == graph_name) return g.name;
    Fail("rank " + std::to_string(rank) + " is in no group " + graph_name);
  }
};

struct Arguments {
  fs::path bundle, deploy, weights, steps, out;
  int64_t rank = -1;
  bool compile_only = false, deterministic = false, states = false;

  static Arguments Read(int argc, char** argv) {
    Arguments a;
    std::map<std::string, fs::path*> paths = {
        {"--bundle", &a.bundle}, {"--deploy", &a.deploy}, {"--weights", &a.weights},
        {"--steps", &a.steps},   {"--out", &a.out}};
    for (int i = 1; i < argc; ++i) {
      const std::string flag = argv[i];
      if (flag == "--compile-only") a.compile_only = true;
      else if (flag == "--deterministic") a.deterministic = true;
      else if (flag == "--states") a.states = true;
      else if (i + 1 == argc) Fail(flag + ": is not known, or has no value");
      else if (flag == "--rank") a.rank = Number(argv[++i], "--rank");
      else if (paths.count(flag) != 0) *paths[flag] = argv[++i];
      else Fail(flag + ": is not known");
    }
    if (a.bundle.empty() || a.deploy.empty() || a.weights.empty() || a.rank < 0)
      Fail("--bundle, --deploy, --weights and --rank are needed");
    if (!a.compile_only && (a.steps.empty() || a.out.empty())) Fail("--steps and --out are needed, or --compile-only");
    return a;
  }
};

// ---- memory of the device -------------------------------------------------------------------------------------------

class Buffer {
 public:
  explicit Buffer(size_t bytes) : bytes_(bytes) {
    CheckAcl(aclrtMalloc(&data_, std::max<size_t>(bytes, 32), ACL_MEM_MALLOC_HUGE_FIRST),
             std::to_string(bytes) + " bytes of the device");
  }
  ~Buffer() { aclrtFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  uint8_t* data() const { return static_cast<uint8_t*>(data_); }
  size_t bytes() const { return bytes_; }

  void Zero() { CheckAcl(aclrtMemset(data_, bytes_, 0, bytes_), "clearing a state"); }

  void Put(const void* from, size_t at, size_t bytes) {
    CheckAcl(aclrtMemcpy(data() + at, bytes_ - at, from, bytes, ACL_MEMCPY_HOST_TO_DEVICE), "copying to the device");
  }

  // Bytes of a file from `offset` on, which must be there, and have this hash where one is given.
  void Load(const fs::path& file, size_t offset, const std::string& what, const std::string& sha256 = "") {
    std::ifstream in(file, std::ios::binary);
    if (!in) Fail(what + ": " + file.string() + " cannot be read");
    in.seekg(static_cast<std::streamoff>(offset));
    std::vector<char> block(std::min(kBlock, std::max<size_t>(bytes_, 1)));
    Sha256 hash;
    for (size_t done = 0; done < bytes_;) {
      const size_t next = std::min(block.size(), bytes_ - done);
      in.read(block.data(), static_cast<std::streamsize>(next));
      if (static_cast<size_t>(in.gcount()) != next)
        Fail(what + ": " + file.string() + " ends after " + std::to_string(done + in.gcount()) + " of " +
             std::to_string(bytes_) + " bytes");
      if (!sha256.empty()) hash.Add(block.data(), next);
      Put(block.data(), done, next);
      done += next;
    }
    if (!sha256.empty() && hash.Hex() != sha256)
      Fail(what + ": " + file.string() + " was changed or damaged: kimi-graph weights --repair makes it anew");
  }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

using Buffers = std::map<std::string, std::unique_ptr<Buffer>>;

ge::Tensor OnDevice(const Port& port, const Buffer& buffer) {
  ge::TensorDesc desc(ge::Shape(port.dims), static_cast<ge::Format>(port.format),
                      static_cast<ge::DataType>(port.dtype));
  desc.SetOriginShape(ge::Shape(port.origin));
  desc.SetOriginFormat(ge::FORMAT_ND);
  desc.SetPlacement(ge::kPlacementDevice);
  ge::Tensor tensor(desc);
  if (tensor.SetData(buffer.data(), port.bytes, [](uint8_t*) {}) != ge::GRAPH_SUCCESS)
    Fail(port.name + ": cannot be bound");
  return tensor;
}

// ---- a rank ---------------------------------------------------------------------------------------------------------

class Rank {
 public:
  explicit Rank(Arguments arguments)
      : args_(std::move(arguments)),
        plan_(RankPlan::Read(args_.deploy / "ranks" / (std::to_string(args_.rank) + ".txt"))) {
    if (plan_.rank != args_.rank) Fail("the plan is of rank " + std::to_string(plan_.rank));
    for (const std::string& name : plan_.graphs)
      graphs_.push_back(GraphPlan::Read(args_.deploy / "graphs" / (name + ".txt")));
  }

  void Run() {
    std::cout << "rank " << plan_.rank << ": starting on device " << plan_.device << std::endl;
    Start();
    Compile();
    Bind();
    std::cout << "rank " << plan_.rank << ": compiled " << graphs_.size() << " graphs, " << Size(weights_)
              << " bytes of weights, " << Size(states_) << " bytes of states" << std::endl;
    if (!args_.compile_only) Steps();
    Stop();
  }

 private:
  void Start() {
    std::map<ge::AscendString, ge::AscendString> options;
    for (const auto& [key, value] : plan_.options) options[key.c_str()] = value.c_str();
    options["ge.exec.deviceId"] = std::to_string(plan_.device).c_str();
    if (args_.deterministic) options["ge.deterministic"] = "1";
    if (plan_.ranks > 1) {
      options["ge.exec.rankTableFile"] = (args_.deploy / "rank_table.json").string().c_str();
      options["ge.exec.hcomGrouplist"] = plan_.GroupList().c_str();
    }
    CheckGe(ge::GEInitialize(options), "GEInitialize");
    CheckAcl(aclInit(nullptr), "aclInit");
    CheckAcl(aclrtSetDevice(static_cast<int32_t>(plan_.device)), "aclrtSetDevice");
    CheckAcl(aclrtCreateStream(&stream_), "aclrtCreateStream");
    session_ = std::make_unique<ge::Session>(std::map<ge::AscendString, ge::AscendString>());
  }

  void Compile() {
    for (uint32_t id = 0; id < graphs_.size(); ++id) {
      const GraphPlan& plan = graphs_[id];
      ge::Graph graph(plan.name.c_str());
      if (graph.LoadFromFile((args_.bundle / plan.file).string().c_str()) != ge::GRAPH_SUCCESS)
        Fail(plan.file + ": GE cannot read it");
      SetPlaces(graph, plan);
      CheckGe(session_->AddGraph(id, graph), "AddGraph " + plan.name);
      CheckGe(session_->CompileGraph(id), "CompileGraph " + plan.name);
    }
  }

  // The rank's place in its groups, where nodes say it, and the names of its communicators.
  void SetPlaces(ge::Graph& graph, const GraphPlan& plan) {
    for (const ge::GNode& node : graph.GetAllNodes()) {
      ge::AscendString text;
      node.GetType(text);
      const std::string type = text.GetString();
      if (auto place = plan.places.find(type); place != plan.places.end()) {
        const auto& [attribute, group] = place->second;
        auto index = plan_.at.find(group);
        if (index == plan_.at.end()) Fail("no place is known in group " + group);
        int64_t value = index->second;
        if (node.SetAttr(attribute.c_str(), value) != ge::GRAPH_SUCCESS)
          Fail(type + ": " + attribute + " cannot be set");
      }
      if (auto found = plan.communicators.find(type); found != plan.communicators.end()) {
        ge::AscendString group;
        if (node.GetAttr(found->second.c_str(), group) != ge::GRAPH_SUCCESS) Fail(type + ": it names no group");
        ge::AscendString name(plan_.Communicator(group.GetString()).c_str());
        if (node.SetAttr(found->second.c_str(), name) != ge::GRAPH_SUCCESS) Fail(type + ": its group cannot be set");
      }
    }
  }

  // Weights and states, once for all graphs of the rank.
  void Bind() {
    struct Part {
      std::string file;
      size_t offset, bytes;
      std::string sha256;
    };
    std::map<std::string, Part> known;
    const fs::path table = args_.deploy / "weights" / (std::to_string(plan_.rank) + ".txt");
    const bool any = std::any_of(graphs_.begin(), graphs_.end(), [](const GraphPlan& g) {
      return std::any_of(g.inputs.begin(), g.inputs.end(), [](const Port& p) { return p.kind == "weight"; });
    });
    if (any)
      for (const Words& line : ReadLines(table))
        known[line[0]] = {Word(line, 1, table), static_cast<size_t>(Number(Word(line, 2, table), table)),
                          static_cast<size_t>(Number(Word(line, 3, table), table)), Word(line, 4, table)};
    for (const GraphPlan& plan : graphs_)
      for (const Port& port : plan.inputs) {
        if (port.kind == "state") {
          if (auto& state = Hold(states_, port)) state->Zero();
        } else if (port.kind == "weight") {
          auto part = known.find(port.name);
          if (part == known.end()) Fail("weight " + port.name + ": " + table.string() + " does not list it");
          if (part->second.bytes != port.bytes)
            Fail("weight " + port.name + ": " + std::to_string(part->second.bytes) +
                 " bytes are listed, the graph reads " + std::to_string(port.bytes));
          if (auto& weight = Hold(weights_, port))
            weight->Load(args_.weights / part->second.file, part->second.offset, port.name, part->second.sha256);
        }
      }
  }

  // The buffer of a port, if it is new; phases that share one must agree on its size.
  static std::unique_ptr<Buffer>& Hold(Buffers& buffers, const Port& port) {
    static std::unique_ptr<Buffer> none;
    auto found = buffers.find(port.name);
    if (found == buffers.end()) return buffers[port.name] = std::make_unique<Buffer>(port.bytes);
    if (found->second->bytes() != port.bytes) Fail(port.name + ": graphs read it in different sizes");
    return none;
  }

  // ---- steps ----

  void Steps() {
    for (int step = 0; fs::exists(args_.steps / std::to_string(step)); ++step) {
      const std::string number = std::to_string(step);
      const fs::path file = args_.steps / number / "phase";
      const std::vector<Words> lines = ReadLines(file);
      const std::string phase = lines.empty() ? "" : lines[0][0];
      if (plan_.phases.count(phase) == 0) Fail(file.string() + ": the manifest's graphs have no phase '" + phase + "'");
      for (uint32_t id = 0; id < graphs_.size(); ++id)
        if (graphs_[id].phase == phase) Step(id, number);
    }
  }

  void Step(uint32_t id, const std::string& step) {
    const GraphPlan& plan = graphs_[id];
    Buffers given;
    std::vector<ge::Tensor> inputs, outputs;
    for (const Port& port : plan.inputs) {
      const fs::path start = Folder(args_.steps, step, plan_.rank) / (port.name + ".bin");
      if (port.kind == "state" && fs::exists(start)) {
        CheckSize(plan, port, start);
        states_.at(port.name)->Load(start, 0, port.name);
      }
      const Buffer* buffer = port.kind == "weight"  ? weights_.at(port.name).get()
                             : port.kind == "state" ? states_.at(port.name).get()
                                                    : (given[port.name] = Input(plan, port, step)).get();
      inputs.push_back(OnDevice(port, *buffer));
    }
    Buffers made;
    for (const Port& port : plan.outputs) {
      made[port.name] = std::make_unique<Buffer>(port.bytes);
      outputs.push_back(OnDevice(port, *made[port.name]));
    }
    CheckGe(session_->RunGraphWithStreamAsync(id, stream_, inputs, outputs), "step " + step + " of " + plan.name);
    CheckAcl(aclrtSynchronizeStream(stream_), "step " + step + " of " + plan.name);
    const fs::path folder = Folder(args_.out, step, plan_.rank);
    fs::create_directories(folder);
    for (const Port& port : plan.outputs) Write(folder / (port.name + ".bin"), *made[port.name]);
    if (args_.states)
      for (const Port& port : plan.inputs)
        if (port.kind == "state") Write(folder / (port.name + ".bin"), *states_.at(port.name));
    std::cout << "rank " << plan_.rank << ": step " << step << " of " << plan.name << " done" << std::endl;
  }

  std::unique_ptr<Buffer> Input(const GraphPlan& plan, const Port& port, const std::string& step) {
    auto buffer = std::make_unique<Buffer>(port.bytes);
    const std::string name = port.name + ".bin";
    if (auto own = plan_.own.find(port.name); own != plan_.own.end()) {
      if (port.bytes != sizeof(int64_t)) Fail(port.name + ": one 64-bit number expected");
      buffer->Put(&own->second, 0, port.bytes);
    } else if (port.name == "causal_mask") {
      buffer->Put(Causal(port).data(), 0, port.bytes);
    } else if (auto read = plan.reads.find(port.name); read != plan.reads.end()) {
      const int64_t giver = plan_.rank - read->second * plan_.stride;
      const fs::path file = Await(Folder(args_.out, step, giver) / name);
      CheckSize(plan, port, file);
      buffer->Load(file, 0, port.name);
    } else {
      const fs::path file = Folder(args_.steps, step, plan_.rank) / name;
      CheckSize(plan, port, file);
      if (auto most = plan.most.find(port.name); most != plan.most.end()) CheckValues(port, file, most->second);
      buffer->Load(file, 0, port.name);
    }
    return buffer;
  }

  static void CheckSize(const GraphPlan& plan, const Port& port, const fs::path& file) {
    std::error_code error;
    const uintmax_t bytes = fs::file_size(file, error);
    if (error) Fail(port.name + ": " + file.string() + " cannot be read");
    if (bytes == port.bytes) return;
    std::string shape;
    for (int64_t dim : port.origin) shape += (shape.empty() ? "" : ", ") + std::to_string(dim);
    Fail(port.name + ": " + file.string() + " has " + std::to_string(bytes) + " bytes; graphs." + plan.name +
         ".inputs of the manifest has shape [" + shape + "], " + std::to_string(port.bytes) + " bytes");
  }

  // Numbers of 32 or 64 bits, each at least 0.
  static void CheckValues(const Port& port, const fs::path& file, const Most& most) {
    const size_t width = port.dtype == kInt32 ? sizeof(int32_t) : sizeof(int64_t);
    std::ifstream in(file, std::ios::binary);
    std::vector<char> bytes(port.bytes);
    in.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    for (size_t at = 0; at + width <= bytes.size(); at += width) {
      int64_t value = 0;
      if (width == sizeof(int32_t)) {
        int32_t narrow = 0;
        std::memcpy(&narrow, bytes.data() + at, width);
        value = narrow;
      } else {
        std::memcpy(&value, bytes.data() + at, width);
      }
      if (value < 0 || value > most.value)
        Fail(port.name + ": " + file.string() + ": number " + std::to_string(at / width) + " is " +
             std::to_string(value) + "; " + most.key + " of the manifest allows 0 to " + std::to_string(most.value));
    }
  }

  fs::path Await(const fs::path& file) const {
    for (int waited = 0; waited < kWaitSeconds * 10; ++waited) {
      if (fs::exists(file)) return file;
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    Fail("waited in vain for " + file.string());
  }

  // True above the diagonal: what a query must not see.
  static std::vector<uint8_t> Causal(const Port& port) {
    const Dims& dims = port.dims;
    if (dims.size() != 2 || port.bytes != static_cast<size_t>(dims[0] * dims[1])) Fail(port.name + ": no mask");
    std::vector<uint8_t> mask(port.bytes);
    for (int64_t row = 0; row < dims[0]; ++row)
      for (int64_t column = row + 1; column < dims[1]; ++column) mask[static_cast<size_t>(row * dims[1] + column)] = 1;
    return mask;
  }

  static fs::path Folder(const fs::path& root, const std::string& step, int64_t rank) {
    return root / step / ("rank" + std::to_string(rank));
  }

  // Beside, then renamed: who waits for the file sees all of it or nothing.
  static void Write(const fs::path& file, const Buffer& buffer) {
    std::vector<char> host(buffer.bytes());
    CheckAcl(aclrtMemcpy(host.data(), host.size(), buffer.data(), host.size(), ACL_MEMCPY_DEVICE_TO_HOST),
             file.string());
    const fs::path part = file.string() + ".part";
    {
      std::ofstream out(part, std::ios::binary);
      out.write(host.data(), static_cast<std::streamsize>(host.size()));
      if (!out.flush()) Fail(part.string() + ": cannot be written");
    }
    fs::rename(part, file);
  }

  static size_t Size(const Buffers& buffers) {
    size_t sum = 0;
    for (const auto& [name, buffer] : buffers) sum += buffer->bytes();
    return sum;
  }

  void Stop() {
    session_.reset();
    weights_.clear();
    states_.clear();
    CheckAcl(aclrtDestroyStream(stream_), "aclrtDestroyStream");
    CheckGe(ge::GEFinalize(), "GEFinalize");
    CheckAcl(aclrtResetDevice(static_cast<int32_t>(plan_.device)), "aclrtResetDevice");
    CheckAcl(aclFinalize(), "aclFinalize");
  }

  Arguments args_;
  RankPlan plan_;
  std::vector<GraphPlan> graphs_;
  std::unique_ptr<ge::Session> session_;
  aclrtStream stream_ = nullptr;
  Buffers weights_, states_;
};

}  // namespace

int main(int argc, char** argv) {
  try {
    Rank(Arguments::Read(argc, argv)).Run();
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << std::endl;
    return 1;
  }
}
