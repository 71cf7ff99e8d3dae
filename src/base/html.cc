#include "base/html.h"

#include <fmt/format.h>

namespace mi::html {

std::string escape(std::string_view s) {
  std::string out;
  for (char c : s) {
    if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '&')
      out += "&amp;";
    else if (c == '"')
      out += "&quot;";
    else
      out += c;
  }
  return out;
}

std::string row(const std::vector<std::string>& cells, const char* tag) {
  std::string out = "<tr>";
  for (const auto& c : cells) out += fmt::format("<{0}>{1}</{0}>", tag, escape(c));
  return out + "</tr>\n";
}

std::string table(const std::vector<std::vector<std::string>>& rows) {
  std::string out = "<table>\n";
  for (size_t i = 0; i < rows.size(); ++i) out += row(rows[i], i == 0 ? "th" : "td");
  return out + "</table>\n";
}

std::string page(std::string_view title, std::string_view body) {
  return fmt::format(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width,initial-scale=1\"><title>{0}</title>\n"
      "<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}}"
      "table{{border-collapse:collapse;margin:.5rem 0 1.5rem;display:block;overflow-x:auto;max-width:100%}}td,th{{border:1px solid #ccc;padding:.25rem "
      ".6rem;text-align:left}}"
      "@media print{{body{{max-width:none;margin:0;font-size:11px}}tr,svg{{break-inside:avoid}}table,pre{{overflow:visible}}table{{display:table}}td,th{{padding:.15rem .3rem;overflow-wrap:break-word}}pre{{white-space:pre-wrap}}*{{print-color-adjust:exact;-webkit-print-color-adjust:exact}}}}"
      "th{{background:#f3f3f3}}pre{{background:#f3f3f3;padding:.6rem;overflow:auto}}svg{{max-width:100%;height:auto}}svg "
      "text{{font:12px system-ui,sans-serif}}</style></head><body>\n<h1>{0}</h1>\n{1}</body></html>\n",
      escape(title), body);
}

}  // namespace mi::html
