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

# Of five parts of the mutants, the one to build and run, 0 to 4; or nothing, for all.
set(PYCOMM_PART "" CACHE STRING "a fifth of the mutants, 0 to 4, or nothing")
set_property(GLOBAL PROPERTY PYCOMM_MUTANTS 0)  # so many
add_custom_target(mutants)
# The test says FAILED, or what COMPLAINT says. It is called with ARGUMENTS.
function(expect_failure target)
  get_property(number GLOBAL PROPERTY PYCOMM_MUTANTS)
  math(EXPR number "${number} + 1")
  set_property(GLOBAL PROPERTY PYCOMM_MUTANTS ${number})
  math(EXPR part "${number} % 5")
  cmake_parse_arguments(PARSE_ARGV 1 HOW "" COMPLAINT ARGUMENTS)
  if(NOT HOW_COMPLAINT)
    set(HOW_COMPLAINT FAILED)
  endif()
  target_compile_options(${target} PRIVATE -O0 -g0 -w)
  set_target_properties(${target} PROPERTIES EXCLUDE_FROM_ALL ON)
  if(NOT PYCOMM_PART STREQUAL "" AND NOT PYCOMM_PART EQUAL part)
    return()
  endif()
  add_dependencies(mutants ${target})
  add_test(NAME ${target} COMMAND ${target} ${HOW_ARGUMENTS})
  set_tests_properties(${target} PROPERTIES
    PASS_REGULAR_EXPRESSION ${HOW_COMPLAINT} TIMEOUT 240 LABELS mutant)
endfunction()
