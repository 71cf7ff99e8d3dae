#pragma once
// The pages for people: "/" a chat, "/dashboard" plots of /metrics. Self-contained; files of ui/, built into the
// program (cmake/embed.cmake).

#include <span>
#include <string>
#include <string_view>

#include "server/http/exchange.h"

namespace mi::server {

struct UiFile {
  std::string_view name, content;
};
std::span<const UiFile> ui_files();

// The file behind a path ("/", "/dashboard", "/ui/NAME"), or null.
const UiFile* find_page(std::string_view path);
void send_page(Exchange& e, const UiFile& file);

}  // namespace mi::server
