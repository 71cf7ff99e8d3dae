#include "text/messages.h"

namespace mi::text {

Status check_messages(const Json& line, const std::string& what) {
  const Json& messages = line.at("messages");
  if (!messages.is_array() || messages.empty()) return bad_input("{}: messages: expected a list of objects with role and content", what);
  for (size_t i = 0; i < messages.size(); ++i) {
    const Json& m = messages[i];
    if (!m.is_object()) return bad_input("{}: messages[{}]: expected an object with role and content", what, i);
    if (!m.contains("role") || !m["role"].is_string()) return bad_input("{}: messages[{}]: role is missing or no text", what, i);
    // An assistant that only calls tools says nothing.
    if (!m.contains("content") && !(m.contains("tool_calls") && m["tool_calls"].is_array()))
      return bad_input("{}: messages[{}]: content is missing", what, i);
    if (m.contains("content") && !m["content"].is_string() && !m["content"].is_array() && !m["content"].is_null())
      return bad_input("{}: messages[{}]: content: expected text, or a list of parts", what, i);
  }
  if (line.contains("tools") && !line["tools"].is_null() && !line["tools"].is_array())
    return bad_input("{}: tools: expected a list of functions", what);
  return {};
}

}  // namespace mi::text
