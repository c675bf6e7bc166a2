// attention_forward.cuh in float16.
#include "attention_forward.cuh"

namespace fastbert {
namespace cuda {

template const char* attention_forward<fp16>(const AttentionFwd& args, std::uintptr_t stream);

}  // namespace cuda
}  // namespace fastbert
