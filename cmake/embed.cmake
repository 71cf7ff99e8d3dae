# cmake -DOUT=FILE.cc -DHEADER=room/file.h -DFILES=a;b -P embed.cmake: files as string literals, for pages that the
# program serves without needing a folder beside it. The header declares
#   namespace mi::server { struct UiFile { std::string_view name, content; }; std::span<const UiFile> ui_files(); }
set(text "#include \"${HEADER}\"\n\nnamespace mi::server {\n\nstd::span<const UiFile> ui_files() {\n  static constexpr UiFile files[] = {\n")
foreach(file ${FILES})
  get_filename_component(name ${file} NAME)
  file(READ ${file} content)
  string(FIND "${content}" ")mi_ui\"" clash)
  if(NOT clash EQUAL -1)
    message(FATAL_ERROR "${file} holds the end mark of the string literal that it becomes")
  endif()
  string(APPEND text "      {\"${name}\", R\"mi_ui(${content})mi_ui\"},\n")
endforeach()
string(APPEND text "  };\n  return files;\n}\n\n}  // namespace mi::server\n")
file(WRITE ${OUT} "${text}")
