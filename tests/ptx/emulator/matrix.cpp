// Forms of tensor cores: mma.sync, ldmatrix, stmatrix, movmatrix.
#include "memory.h"

namespace ptx {

void matrix_forms() {}

}  // namespace ptx
