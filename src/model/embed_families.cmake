# Writes OUT: the text of every file of FILES as a raw string literal.
set(text "// Generated from families/*.yaml.\n#include \"model/recipe.h\"\n\nnamespace mi::model {\n\nconst std::vector<EmbeddedFamily>& embedded_families() {\n  static const std::vector<EmbeddedFamily> families = {\n")
foreach(f ${FILES})
  get_filename_component(name ${f} NAME_WE)
  file(READ ${f} yaml)
  string(APPEND text "      {\"${name}\", R\"yaml(${yaml})yaml\"},\n")
endforeach()
string(APPEND text "  };\n  return families;\n}\n\n}  // namespace mi::model\n")
file(WRITE ${OUT} "${text}")
