// attention_forward.cuh in bfloat16.
#include "attention_forward.cuh"

namespace fastbert {
namespace cuda {

template const char* attention_forward<bf16>(const AttentionFwd& args, std::uintptr_t stream);

}  // namespace cuda
}  // namespace fastbert
