# The algorithms of core/ on the executor that decides all interleavings (checker/comm.h): once as they
# are, and once for each mutant of core/, which it has to refuse.
set(CHECKER ${CMAKE_CURRENT_LIST_DIR})
add_library(checker STATIC ${CHECKER}/../test_checker.cpp ${CHECKER}/comm.cpp ${CHECKER}/fibers.cpp
  ${CHECKER}/link.cpp ${CHECKER}/memory.cpp ${CHECKER}/symbols.cpp ${CHECKER}/world.cpp)
target_include_directories(checker PUBLIC csrc tests/cpp)

add_executable(test_checker ${CHECKER}/algorithms.cpp)
target_link_libraries(test_checker PRIVATE checker)
add_test(NAME checker COMMAND test_checker)

# A mutant is a copy of one header in which some text, which must be there, is another one. Only what
# includes the header is compiled for it, and without optimisation.
function(add_mutant name header old new)
  set(original ${PROJECT_SOURCE_DIR}/csrc/core/${header})
  file(READ ${original} text)
  string(FIND "${text}" "${old}" place)
  if(place EQUAL -1)
    message(FATAL_ERROR "csrc/core/${header} has no text for the mutant ${name}:\n${old}")
  endif()
  string(REPLACE "${old}" "${new}" text "${text}")
  set(copy ${PROJECT_BINARY_DIR}/mutants/${name})
  file(GENERATE OUTPUT ${copy}/core/${header} CONTENT "${text}")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${original})

  add_executable(mutant_${name} ${CHECKER}/algorithms.cpp)
  target_include_directories(mutant_${name} BEFORE PRIVATE ${copy})
  target_compile_options(mutant_${name} PRIVATE -O0 -g0 -w)
  target_link_libraries(mutant_${name} PRIVATE checker)
  add_test(NAME mutant_${name} COMMAND mutant_${name})
  set_tests_properties(mutant_${name} PROPERTIES PASS_REGULAR_EXPRESSION "FAILED" TIMEOUT 60)
endfunction()

include(${CHECKER}/mutants.cmake)
