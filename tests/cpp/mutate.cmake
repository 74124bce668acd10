# Mutants: copies of a source with a fault, in which a test must find it.

# Writes to `to` a copy of a file of csrc/ or `from`, with text `old`, which must be there, replaced
# by `new`.
function(mutate file to old new)
  set(from csrc ${ARGN})
  list(GET from -1 from)
  set(original ${PROJECT_SOURCE_DIR}/${from}/${file})
  file(READ ${original} text)
  string(FIND "${text}" "${old}" place)
  if(place EQUAL -1)
    message(FATAL_ERROR "${from}/${file} has no text for the mutant ${to}:\n${old}")
  endif()
  string(REPLACE "${old}" "${new}" text "${text}")
  file(GENERATE OUTPUT ${to}/${file} CONTENT "${text}")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${original})
endfunction()

add_custom_target(mutants)
# The test says FAILED, or what COMPLAINT says. It is called with ARGUMENTS.
function(expect_failure target)
  cmake_parse_arguments(PARSE_ARGV 1 HOW "" COMPLAINT ARGUMENTS)
  if(NOT HOW_COMPLAINT)
    set(HOW_COMPLAINT FAILED)
  endif()
  target_compile_options(${target} PRIVATE -O0 -g0 -w)
  set_target_properties(${target} PROPERTIES EXCLUDE_FROM_ALL ON)
  add_dependencies(mutants ${target})
  add_test(NAME ${target} COMMAND ${target} ${HOW_ARGUMENTS})
  set_tests_properties(${target} PROPERTIES
    PASS_REGULAR_EXPRESSION ${HOW_COMPLAINT} TIMEOUT 60 LABELS mutant)
endfunction()
