#include "kernels/attention/attention_impl.h"
