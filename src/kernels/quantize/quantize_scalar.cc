#include "kernels/quantize/quantize_impl.h"
