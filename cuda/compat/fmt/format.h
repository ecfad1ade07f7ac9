#pragma once

// MLX's CUDA headers use fmt::format in one place, and its wheels ship no fmt. This stands in for
// the library: "{}" placeholders only.

#include <sstream>
#include <string>
#include <string_view>

namespace fmt {

template <class... Args>
std::string format(std::string_view text, const Args&... args) {
  std::ostringstream out;
  auto put = [&](const auto& value) {
    const size_t at = text.find("{}");
    out << text.substr(0, at) << value;
    text.remove_prefix(at == std::string_view::npos ? text.size() : at + 2);
  };
  (put(args), ...);
  out << text;
  return out.str();
}

}  // namespace fmt
