# Fails when an object file compiled with ISA flags defines a symbol that the linker may merge with another file's (weak,
# unique): the merged copy could be the wide one, and a plain CPU would then run it.
#   cmake -DNM=nm -DOBJECTS="a.o b_avx2.o" -P check_isa_symbols.cmake
separate_arguments(OBJECTS)
foreach(object ${OBJECTS})
  if(object MATCHES "_(avx|amx)[0-9a-z]*\\.cc\\.o$")
    execute_process(COMMAND ${NM} --defined-only ${object} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
    string(REGEX MATCHALL "[^\n]* [WVu] [^\n]*" shared "${symbols}")
    if(shared)
      message(SEND_ERROR "${object} defines symbols that may be merged: ${shared}")
    endif()
    math(EXPR checked "${checked} + 1")
  endif()
endforeach()
if(NOT checked)
  message(SEND_ERROR "no object with an ISA suffix among: ${OBJECTS}")
endif()
