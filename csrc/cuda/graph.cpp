#include "cuda/graph.h"

namespace atlas {
namespace cuda {

GraphExec record(const Driver& cuda, Stream stream, const std::string& what,
                 const std::function<void()>& submit) {
  // Thread-local: other threads may do with the driver what they like meanwhile.
  check(cuda.capture_begin(stream, kCaptureThreadLocal), what);
  Graph graph = nullptr;
  try {
    submit();
  } catch (...) {
    if (cuda.capture_end(stream, &graph) == 0 && graph != nullptr) cuda.graph_destroy(graph);
    throw;
  }
  check(cuda.capture_end(stream, &graph), what);
  GraphExec exec = nullptr;
  Result result = cuda.graph_instantiate(&exec, graph, 0);
  cuda.graph_destroy(graph);
  if (result == 0) {
    // Without this the first replay would do it, and may allocate.
    result = cuda.graph_upload(exec, stream);
    if (result != 0) cuda.graph_exec_destroy(exec);
  }
  check(result, what + " cannot be made ready");
  return exec;
}

}  // namespace cuda
}  // namespace atlas
