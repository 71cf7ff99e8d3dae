#include "server/pages.h"

namespace mi::server {
namespace {

// Scripts, styles and connections of this server alone, nothing inline: even markup that got into a page could neither
// run nor tell anyone anything.
constexpr const char* kPolicy =
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'";

std::string_view type_of(std::string_view name) {
  if (name.ends_with(".html")) return "text/html; charset=utf-8";
  if (name.ends_with(".css")) return "text/css; charset=utf-8";
  if (name.ends_with(".svg")) return "image/svg+xml";
  return "text/javascript; charset=utf-8";
}

}  // namespace

const UiFile* find_page(std::string_view path) {
  std::string_view name = path == "/" ? "chat.html" : path == "/dashboard" ? "dashboard.html" : "";
  constexpr std::string_view kFolder = "/ui/";
  if (path.starts_with(kFolder) && !path.ends_with(".html")) name = path.substr(kFolder.size());
  for (const UiFile& f : ui_files())
    if (f.name == name) return &f;
  return nullptr;
}

void send_page(Exchange& e, const UiFile& file) {
  e.respond(200, type_of(file.name), file.content,
            {{"Content-Security-Policy", kPolicy},
             {"X-Content-Type-Options", "nosniff"},
             {"Referrer-Policy", "no-referrer"},
             {"Cache-Control", "no-cache"}});
}

}  // namespace mi::server
