# What keeps builds short.

# MI_PCH: the headers that nearly every file includes are read once, for the rooms by mi_base and for the tests by
# mi_base_test; the others reuse it. Files with an ISA suffix have flags of their own and stay without. A file still
# includes what it uses: the presets without MI_PCH would not compile otherwise.
set(MI_PCH_HEADERS <algorithm> <array> <chrono> <filesystem> <fstream> <functional> <map> <memory> <optional> <set> <span>
                   <string> <string_view> <utility> <variant> <vector> <fmt/format.h> <nlohmann/json.hpp>)
set(MI_PCH_TEST_HEADERS ${MI_PCH_HEADERS} <gmock/gmock.h> <gtest/gtest.h>)

# mi_precompile(TARGET OWNER HEADERS)
function(mi_precompile target owner headers)
  if(NOT MI_PCH)
    return()
  endif()
  if(target STREQUAL owner)
    target_precompile_headers(${target} PRIVATE ${headers})
  else()
    target_precompile_headers(${target} REUSE_FROM ${owner})
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(${target} PRIVATE -fpch-preprocess)   # ccache asks for it
  endif()
endfunction()

# mi_test_options(TARGET): under a sanitizer the tests' own files are not optimised, only the rooms that they test: half
# of such a build would go into inlining GoogleTest.
function(mi_test_options target)
  mi_precompile(${target} mi_base_test "${MI_PCH_TEST_HEADERS}")
  if(MI_SANITIZE)
    target_compile_options(${target} PRIVATE -O0)
  endif()
endfunction()
