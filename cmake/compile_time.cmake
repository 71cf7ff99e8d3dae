# What keeps builds short.

# The headers that nearly every file includes are read once: for the tests by mi_base_test and, with MI_PCH, for the rooms
# by one of them; the others reuse it. Files with an ISA suffix have flags of their own and stay without. A room's file
# still includes what it uses: the presets without MI_PCH would not compile otherwise.
set(MI_PCH_HEADERS <algorithm> <array> <chrono> <filesystem> <fstream> <functional> <map> <memory> <optional> <set> <span>
                   <string> <string_view> <utility> <variant> <vector> <fmt/format.h> <nlohmann/json.hpp>)
set(MI_PCH_TEST_HEADERS ${MI_PCH_HEADERS} <gmock/gmock.h> <gtest/gtest.h>)

# mi_precompile(TARGET OWNER HEADERS)
function(mi_precompile target owner headers)
  if(target STREQUAL owner)
    target_precompile_headers(${target} PRIVATE ${headers})
  else()
    target_precompile_headers(${target} REUSE_FROM ${owner})
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(${target} PRIVATE -fpch-preprocess)   # ccache asks for it
  else()
    target_compile_options(${target} PRIVATE "SHELL:-Xclang -fno-pch-timestamp")   # likewise
  endif()
endfunction()

# The rooms whose loops the tests wait for. Under a sanitizer only they, and what fuzzers run, are optimised: instrumented
# code takes three times as long to optimise as plain code, and what is not optimised away is checked.
set(MI_HOT_ROOMS base hw tensor text kernels exec quant runtime)
set(MI_NOT_OPTIMISED -O0 -Wno-return-type)   # only optimising shows GCC that MI_CHECK(false, ...) does not return

# mi_room_options(TARGET ROOM FUZZED)
function(mi_room_options target room fuzzed)
  set(owner mi_base)
  if(MI_SANITIZE AND NOT fuzzed AND NOT room IN_LIST MI_HOT_ROOMS)
    # A precompiled header is good for one level of optimisation: its owner is the first room without it.
    set(owner mi_ir)
    if(MI_FUZZ)
      set(owner mi_compiler)
    endif()
    target_compile_options(${target} PRIVATE ${MI_NOT_OPTIMISED})
  endif()
  if(MI_PCH)
    mi_precompile(${target} ${owner} "${MI_PCH_HEADERS}")
  endif()
endfunction()

# mi_test_options(TARGET): tests are optimised a little, not at all under a sanitizer: they check, the rooms compute.
function(mi_test_options target)
  if(MI_SANITIZE)
    target_compile_options(${target} PRIVATE ${MI_NOT_OPTIMISED})
  else()
    target_compile_options(${target} PRIVATE -O1)
  endif()
  mi_precompile(${target} mi_base_test "${MI_PCH_TEST_HEADERS}")
endfunction()
