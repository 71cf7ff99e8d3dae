#include "kernels/sample/sample_impl.h"
