# The Rust static library (rust/): tokenizers, chat templates and grammars behind one C header.
# Built by cargo with the checked-in Cargo.lock, once for all presets (the sanitizer presets link the same archive);
# the target mi_rust_text carries the archive, its header and its system libraries. Cargo decides what to rebuild, and
# an archive it left alone relinks nothing.
find_program(MI_CARGO cargo HINTS $ENV{HOME}/.cargo/bin /usr/bin)
if(NOT MI_CARGO)
  message(FATAL_ERROR "cargo was not found: run scripts/setup, which installs what the build needs")
endif()
set(MI_RUST_TARGET_DIR ${CMAKE_SOURCE_DIR}/build/rust CACHE PATH "where cargo builds (shared by all presets)")
set(MI_RUST_ARCHIVE ${MI_RUST_TARGET_DIR}/release/libmi_text.a)
file(GLOB_RECURSE MI_RUST_SOURCES CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/rust/src/*.rs)
add_custom_command(
  OUTPUT ${MI_RUST_ARCHIVE}
  COMMAND ${CMAKE_COMMAND} -E env CARGO_TARGET_DIR=${MI_RUST_TARGET_DIR}
          ${MI_CARGO} build --release --locked --manifest-path ${CMAKE_SOURCE_DIR}/rust/Cargo.toml
  DEPENDS ${MI_RUST_SOURCES} ${CMAKE_SOURCE_DIR}/rust/Cargo.toml ${CMAKE_SOURCE_DIR}/rust/Cargo.lock
  COMMENT "cargo: tokenizers, chat templates, grammars (about two minutes the first time)"
  USES_TERMINAL  # else nothing is said until all of it is built
  VERBATIM)
add_custom_target(mi_rust_build DEPENDS ${MI_RUST_ARCHIVE})
add_library(mi_rust_text INTERFACE)
add_dependencies(mi_rust_text mi_rust_build)
target_include_directories(mi_rust_text INTERFACE ${CMAKE_SOURCE_DIR}/rust/include)
target_link_libraries(mi_rust_text INTERFACE ${MI_RUST_ARCHIVE} dl m Threads::Threads)
