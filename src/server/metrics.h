#pragma once
// /metrics in the Prometheus text format, under the names that dashboards for vLLM know ("vllm:..."), from a snapshot
// of the loop's numbers. Never waits for a step.

#include <string>

#include "server/context.h"

namespace mi::server {
std::string metrics_text(ServerContext& c);
}
