# What keeps builds short.

# MI_PCH: the headers that nearly every file includes are read once, for the rooms by one of them and for the tests by
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

# The rooms whose loops the tests wait for. Under a sanitizer only they are optimised: instrumented code takes GCC three
# times as long to optimise as plain code, and what is not optimised away is checked. With MI_FAST_BUILD the others and
# the tests are optimised a little: enough for the checks, and quicker to compile.
set(MI_HOT_ROOMS base hw tensor text kernels exec quant runtime)
set(MI_NOT_OPTIMISED -O0 -Wno-return-type)   # only optimising shows GCC that MI_CHECK(false, ...) does not return

# mi_room_options(TARGET ROOM)
function(mi_room_options target room)
  set(owner mi_base)
  if(NOT room IN_LIST MI_HOT_ROOMS AND NOT MI_FUZZ)
    if(MI_SANITIZE)
      set(owner mi_ir)      # a precompiled header is good for one level of optimisation
      target_compile_options(${target} PRIVATE ${MI_NOT_OPTIMISED})
    elseif(MI_FAST_BUILD)
      set(owner mi_ir)
      target_compile_options(${target} PRIVATE -O1)
    endif()
  endif()
  mi_precompile(${target} ${owner} "${MI_PCH_HEADERS}")
endfunction()

# mi_test_options(TARGET)
function(mi_test_options target)
  if(MI_SANITIZE)
    target_compile_options(${target} PRIVATE ${MI_NOT_OPTIMISED})
  elseif(MI_FAST_BUILD)
    target_compile_options(${target} PRIVATE -O1)
  endif()
  mi_precompile(${target} mi_base_test "${MI_PCH_TEST_HEADERS}")
endfunction()
