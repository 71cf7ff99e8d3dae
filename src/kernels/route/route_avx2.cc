#include "kernels/route/route_impl.h"
