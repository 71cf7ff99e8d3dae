#include "kernels/moe/moe_impl.h"
