#pragma once
// Pages that this program writes: one style, everything inside, no scripts, nothing loaded.

#include <string>
#include <string_view>
#include <vector>

namespace mi::html {

std::string escape(std::string_view s);
// A table's row; cells are escaped.
std::string row(const std::vector<std::string>& cells, const char* tag = "td");
// <table> of rows, the first of them the header.
std::string table(const std::vector<std::vector<std::string>>& rows);
// A whole page; title is escaped and stands above the body, which is HTML.
std::string page(std::string_view title, std::string_view body);

}  // namespace mi::html
