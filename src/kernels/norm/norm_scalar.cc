#include "kernels/norm/norm_impl.h"
